"""`dp freeze`: from a checkpoint to the model file that DeePMD-kit and this program read."""

from __future__ import annotations

import logging
from pathlib import Path

from allforce.files.checkpoint import find
from allforce.files.model_file import CONVERTIBLE, WRITTEN, load_model, save_model

log = logging.getLogger("deepmd.entrypoints.freeze")


def freeze(checkpoint: str = ".", output: str = "frozen_model") -> Path:
    """checkpoint: a directory with a file `checkpoint`, a prefix (model.ckpt) or a file; output without suffix: .dp."""
    path = Path(output)
    if path.suffix not in (*WRITTEN, *CONVERTIBLE):
        path = path.with_name(path.name + WRITTEN[0])
    model = load_model(find(checkpoint))
    save_model(model, path)
    for caveat in model.caveats():
        log.warning("%s: %s", path, caveat)
    log.info("Saved frozen model to %s", path)
    return path

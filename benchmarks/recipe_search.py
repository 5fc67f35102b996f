"""Which learning rate serves the recipe? Errors on validation data after a fixed number of steps, for several rates.

    python benchmarks/recipe_search.py --train data_0 data_1 data_2 --valid data_3 --steps 300 --rates 0.02,0.04,0.08
    python benchmarks/recipe_search.py --train run.xyz --valid test.xyz --own-batch 16 --set optimizer/adam_beta2=0.99

Nets, data and losses are those of time_to_accuracy.py; nothing here is a measurement of time, so it may run on a busy
machine. `--set` changes one key of the recipe.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from common import markdown_table
from time_to_accuracy import as_npy, config_of, one


def changed(config: dict, path: str, value: object) -> None:
    *sections, key = path.split("/")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--valid", nargs="+", required=True)
    parser.add_argument("--precision", default="float32", choices=["float32", "float64"])
    parser.add_argument("--own-batch", type=lambda text: int(text) if text.isdigit() else text, default="auto:256")
    parser.set_defaults(batch=1, own_neuron="")
    parser.add_argument("--steps", default="300")
    parser.add_argument("--rates", default="0.02,0.04,0.08")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        data, type_map = as_npy(args.train, Path(tmp) / "train", None)
        unseen, _ = as_npy(args.valid, Path(tmp) / "valid", type_map)
        for steps in map(int, args.steps.split(",")):
            for rate in map(float, args.rates.split(",")):
                runs = []
                for seed in range(1, args.seeds + 1):
                    config = config_of("ours", steps, seed, type_map, data, args)
                    config["learning_rate"] |= {"start_lr": rate, "reference_steps": steps}
                    for pair in args.set:
                        path, value = pair.split("=", 1)
                        changed(config, path, json.loads(value))
                    runs.append(one("ours", config, Path(tmp) / f"{steps}-{rate}-{seed}", unseen, args.threads))
                spread = [f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})" for values in columns(runs)]
                rows.append([str(steps), f"{rate:g}", *spread])
    print(markdown_table(["steps", "rate", "force RMSE, eV/Å", "energy RMSE, meV/atom"], rows))


def columns(runs: list[dict[str, float]]) -> list[list[float]]:
    return [[run[key] for run in runs] for key in ("force", "energy")]


if __name__ == "__main__":
    main()

"""The repository keeps its promises: import direction, sizes, documentation that fits the program, the example."""

from __future__ import annotations

import ast
import re
import shlex
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from allforce.cli import parser
from allforce.config.load import load_input
from allforce.config.reference import reference_markdown

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "allforce").rglob("*.py"))
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)


def architecture() -> dict[str, set[str]]:
    """The table of docs/architecture.md: what a part may import, by the beginning of the module's name."""
    rows: dict[str, set[str]] = {}
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        if match := re.match(r"\| (`[^|]*`) \| ([^|]*)\|", line):
            parts, allowed = (re.findall(r"`([^`]+)`", cell) for cell in match.groups())
            above = set(rows)
            unknown = [name for name in allowed if not any(f"{name}.".startswith(f"{p}.") for p in above)]
            assert not unknown, f"docs/architecture.md: {parts} may import {unknown}, which no row above names"
            rows |= {part: {*allowed, *parts} for part in parts}
    return rows


MAY_IMPORT = {**architecture(), "__main__": {"cli"}, "__init__": {"infer.predict"}}
LONGEST_FILE, LONGEST_FUNCTION = 450, 60


def relative_to_package(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "allforce").with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Modules of allforce that a file imports, without the leading `allforce.`; those for annotations do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    package = ["allforce", *path.relative_to(ROOT / "allforce").parts[:-1]]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("allforce.") for name in found if name.startswith("allforce.")} - {"__version__"}


@pytest.mark.parametrize("path", SOURCES, ids=relative_to_package)
def test_import_direction(path):
    module = relative_to_package(path)
    part = max((p for p in MAY_IMPORT if f"{module}.".startswith(f"{p}.")), key=len, default=None)
    assert part, f"{path} belongs to no part: extend the table of docs/architecture.md"
    allowed = MAY_IMPORT[part]
    wrong = {name for name in imports(path) if not any(f"{name}.".startswith(f"{good}.") for good in allowed)}
    assert not wrong, f"{path} imports {sorted(wrong)}; {part} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=relative_to_package)
def test_nothing_is_pickled(path):
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
            assert node.attr == "UnpicklingError"  # what torch.load raises when it refuses a file
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
            safe = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}[ast.unparse(node.func)]
            assert safe in ast.unparse(node) or "mmap_mode" in ast.unparse(node), f"{path}:{node.lineno}"
    assert "cloudpickle" not in source
    assert "from pickle import" not in source


@pytest.mark.parametrize("path", SOURCES, ids=relative_to_package)
def test_sizes(path):
    source = path.read_text()
    assert source.count("\n") <= LONGEST_FILE, f"{path} has grown: one file, one subject"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name} has {lines} lines"


# ---- documentation


def code_of(page: Path) -> list[str]:
    """Shell lines of a page: those of bash blocks and of spans in backticks, with continuation lines joined."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.S | re.M)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line.strip() for line in [*"\n".join(blocks).splitlines(), *indented, *spans]]


def dp_commands() -> list[tuple[str, str]]:
    """(page, arguments) of every `dp …` of the documentation, behind a launcher or not."""
    found = []
    for page in PAGES:
        for line in code_of(page):
            for command in re.split(r"&&|;", line.partition(" #")[0]):
                match = re.match(
                    r"(?:[A-Z_]+=\S+ )*(?:(?:mpirun|mpiexec|srun|jsrun|flux|torchrun|horovodrun)\b.* )?dp ([a-z].*)$",
                    command.strip(),
                )
                if match and "COMMAND" not in line and "convert-backend" not in line:
                    found.append((page.name, match[1].strip()))
    return found


def test_commands_of_the_documentation_parse(capsys):
    commands = dp_commands()
    assert len(commands) > 30
    for page, arguments in commands:
        words = shlex.split(arguments)
        if len(words) == 1 or words == ["train", "--help"]:  # a bare name, as in "`dp train` writes …"
            words = [words[0], "--help"]
        try:
            parser().parse_args(words)
        except SystemExit as end:
            assert not end.code, f"{page}: dp {arguments}: {capsys.readouterr().err}"


def test_options_of_the_documentation_exist(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["train", "--help"])
    known = capsys.readouterr().out
    for option in re.findall(
        r"`(--[a-z-]+)`", (ROOT / "docs/commands.md").read_text().partition("## dp train")[2].partition("## ")[0]
    ):
        assert option in known


def test_make_targets_of_the_documentation_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {m for page in PAGES for line in code_of(page) for m in re.findall(r"^make ([a-z]+)", line)}
    assert {"demo", "test", "venv"} <= named <= targets


def test_links_and_files_of_the_documentation_exist():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page} links to {target}"
        for name in re.findall(r"`((?:allforce|benchmarks|docs|examples|scripts|tests)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_files_of_the_architecture_page_exist():
    text = (ROOT / "docs/architecture.md").read_text() + (ROOT / "docs/adding_a_model.md").read_text()
    for name in re.findall(r"`((?:config|data|optim|models|distributed|train|infer)/[\w/]*\.py)`", text):
        assert (ROOT / "allforce" / name).exists(), name


def test_input_reference_is_that_of_the_schema():
    assert (ROOT / "docs/input.md").read_text().strip() == reference_markdown().strip(), "run `make docs`"


def test_keys_named_in_the_documentation_exist():
    keys = set(re.findall(r"[a-z][a-z0-9_]+", reference_markdown()))
    for page in PAGES:
        for key in re.findall(r"`(?:training|learning_rate|loss)\.(?!py)([a-z_]+)", page.read_text()):
            assert key in keys, f"{page}: {key}"


def test_environment_variables_of_the_documentation_are_read():
    source = "\n".join(path.read_text() for path in SOURCES)
    text = "\n".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    named = set(re.findall(r"`((?:ALLFORCE|DP|OMP|MASTER|CUDA)_[A-Z_]+)`", text))
    assert len(named) > 5
    assert not {name for name in named if name not in source}


# ---- packaging, example


def test_pins_are_within_the_ranges():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {r.name.lower().replace("_", "-"): str(r.specifier).removeprefix("==") for r in map(Requirement, lines)}
    wanted = [Requirement(text) for text in requires("allforce") or []]
    assert len(wanted) > 10
    for requirement in wanted:
        pin = pins.get(requirement.name.lower().replace("_", "-"))
        assert pin and requirement.specifier.contains(pin), f"{requirement} is not met by the pin {pin}"


def frames(folder: Path) -> int:
    total = 0
    for system in sorted(p.parent for p in folder.rglob("type.raw")):
        atoms = len((system / "type.raw").read_text().split())
        arrays = {p.stem: np.load(p) for p in (system / "set.000").glob("*.npy")}
        assert {"coord", "box", "energy", "force", "virial"} <= arrays.keys(), system
        assert all(np.isfinite(a).all() for a in arrays.values()), system
        assert arrays["force"].shape == arrays["coord"].shape == (len(arrays["energy"]), 3 * atoms)
        total += len(arrays["energy"])
    return total


def test_shipped_example():
    config = load_input(ROOT / "examples/water/input.json").training
    assert config.training_data.systems == "data/train"
    assert frames(ROOT / "examples/water/data/train") >= 200
    assert frames(ROOT / "examples/water/data/valid") >= 40

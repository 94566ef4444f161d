"""The rules of the layout: which part may import which, what starts without frameworks, how large a module grows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdkit"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "tensorflow", "keras", "horovod", "mpi4py")

# A part may import the parts named here, and itself. Parts are folders or modules of hvdkit.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "world": {"errors"},
    "log": {"errors", "world"},
    "abort": {"errors", "log"},
    "build_stamp": {"errors", "log"},
    "arguments": {"errors"},
    "permutation": {"errors", "arguments"},
    "plan_state": {"errors", "arguments"},
    "sharding": {"errors", "log", "arguments", "permutation", "plan_state"},
    "schedule": {"errors", "arguments"},
    "statistics": {"errors", "arguments"},
    "metrics": {"errors", "arguments", "statistics", "distributions"},
    "distributions": {"errors", "arguments", "statistics"},
    "files": {"errors", "arguments", "permutation"},
    "records": {"errors", "arguments", "files"},
    "payload": {"errors"},
    "checkpoint": {"errors", "log", "arguments", "payload"},
}
CORE = set(MAY_IMPORT)
MAY_IMPORT["torch"] = MAY_IMPORT["tf"] = {*CORE}
MAY_IMPORT["launch"] = {"errors", "log", "world"}
MAY_IMPORT["horovod_build"] = {"errors", "log", "world"}
MAY_IMPORT["doctor"] = {"errors", "log", "world", "launch", "horovod_build"}
MAY_IMPORT["cli"] = {"errors", "log", "world", "launch", "horovod_build", "doctor"}
MAY_IMPORT["__main__"] = {"cli"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which part is meant"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in MAY_IMPORT, f"{part} is not in the table of this test: say where it stands"
    names = imported_modules(ast.parse(path.read_text()))
    inner = {name.split(".")[1] for name in names if name.startswith("hvdkit.") and name.count(".") >= 1}
    parts = {n for n in inner if (PACKAGE / n).is_dir() or (PACKAGE / f"{n}.py").exists()}
    assert parts <= MAY_IMPORT[part] | {part}
    frameworks = {name.split(".")[0] for name in names} & set(HEAVY)
    if part == "torch":
        assert not frameworks & {"tensorflow", "keras"}
        assert not any(n.startswith(("horovod.tensorflow", "horovod.keras")) for n in names)
    elif part == "tf":
        assert not frameworks & {"torch"}
        assert not any(n.startswith("horovod.torch") for n in names)
    elif part == "abort" or path.name in ("probe.py", "rank_probe.py"):
        assert frameworks <= {"mpi4py"}
    else:
        assert not frameworks, f"{path} imports {frameworks}"


LIGHT = ["hvdkit", "hvdkit.__main__:skip"] + [
    ".".join(("hvdkit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in MODULES
    if part_of(path) in ("errors", "world", "log", "launch", "cli")
]


def test_launch_and_cli_import_no_framework_and_nothing_slow() -> None:
    """One fresh interpreter imports every module of launch/ and cli/ and looks at sys.modules."""
    names = [name for name in LIGHT if not name.endswith(":skip")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(out) & {*HEAVY, "rich", "matplotlib", "sklearn"}


def test_import_hvdkit_loads_not_even_numpy() -> None:
    code = "import hvdkit, sys; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(out) & {*HEAVY, "numpy", "click", "rich"}


def test_modules_and_functions_keep_their_size() -> None:
    long = []
    for path in [*MODULES, *sorted((ROOT / "bench").rglob("*.py"))]:
        text = path.read_text()
        if text.count("\n") > 300:
            long.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_code(node) > 40:
                long.append(f"{path.name}: {node.name} has {lines_of_code(node)} lines of code")
    assert not long


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body. The signature does not count: Horovod's has up to twenty arguments, and hvdkit keeps it."""
    body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1


def literal(path: Path, name: str) -> Any:
    """The value that a module gives to ``name`` at its top, read without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} gives no value to {name}")


def test_both_adapters_add_the_same_names() -> None:
    torch_init = PACKAGE / "torch" / "__init__.py"
    ours = set(literal(torch_init, "__all__"))
    ours -= {*literal(torch_init, "FIXED_NAMES"), *literal(torch_init, "ONLY_TORCH")}
    renamed = {"DataLoader": "dataset"}
    assert {renamed.get(name, name) for name in ours} == set(literal(PACKAGE / "tf" / "__init__.py", "HVDKIT_NAMES"))


def test_both_adapters_have_the_same_rooms() -> None:
    shared = {"__init__", "collectives", "data", "metrics", "optimizer", "random_state", "runtime", "schedule"}
    shared |= {"sync", "training_state"}
    for part in ("torch", "tf"):
        assert shared <= {path.stem for path in (PACKAGE / part).glob("*.py")}


def test_no_shell_and_no_pickle() -> None:
    """Nothing goes through a shell, and checkpoints load without unpickling code."""
    for path in MODULES:
        text = path.read_text()
        assert not re.search(r"shell\s*=\s*True|os\.system\(|os\.popen\(", text), path
        assert not re.search(r"weights_only\s*=\s*False|allow_pickle\s*=\s*True|pickle\.load\(", text, re.M), path

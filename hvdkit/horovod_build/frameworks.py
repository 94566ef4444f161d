"""The frameworks of this environment: which are installed, and what their headers demand of a build.

Versions come from the installed metadata, which takes milliseconds. What only the framework itself can tell is asked
of a new process, so that this one never imports torch or TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdkit.errors import BuildError, UsageError
from hvdkit.horovod_build.process import Answer, ask

# module name -> the distributions that provide it
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-rocm",
        "tensorflow-aarch64",
        "intel-tensorflow",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
}
# module name -> the flag in Horovod's own names (HOROVOD_WITH_…)
HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}

_MARK = "hvdkit-framework:"
_ASK_TORCH = """
import json, os, torch
print("\\n" + MARK + json.dumps(dict(
    version=torch.__version__, include=[os.path.join(os.path.dirname(torch.__file__), "include")],
    flags=[], cuda=torch.version.cuda, cxx11=bool(torch.compiled_with_cxx11_abi()))))
"""
_ASK_TENSORFLOW = """
import json, tensorflow as tf
info = tf.sysconfig.get_build_info()
print("\\n" + MARK + json.dumps(dict(
    version=tf.__version__, include=[tf.sysconfig.get_include()], flags=tf.sysconfig.get_compile_flags(),
    cuda=info.get("cuda_version") if info.get("is_cuda_build") else None, cxx11=True)))
"""
_QUESTIONS = {"torch": _ASK_TORCH, "tensorflow": _ASK_TENSORFLOW}


@dataclass(frozen=True)
class Framework:
    """One framework that can be imported. ``cxx_standard`` is what its headers need (17 for C++17)."""

    name: str
    version: str
    cxx_standard: int
    cuda: str | None = None
    xla_headers: bool = True


def parse_names(text: str) -> tuple[str, ...]:
    """``"torch,tensorflow"`` -> names, in the order of ``DISTRIBUTIONS``. Raises ``UsageError`` for any other name."""
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    aliases = {"pytorch": "torch", "tf": "tensorflow"}
    names = [aliases.get(name, name) for name in names]
    unknown = [name for name in names if name not in DISTRIBUTIONS]
    if unknown or not names:
        given = ", ".join(unknown) or "nothing"
        raise UsageError(f"--with: got {given}; accepted: {', '.join(DISTRIBUTIONS)}, separated by commas")
    return tuple(name for name in DISTRIBUTIONS if name in names)


def installed_version(name: str) -> str | None:
    """Version of an installed framework, without importing it; ``None`` where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    for distribution in DISTRIBUTIONS[name]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    others = metadata.packages_distributions().get(name, [])
    return metadata.version(others[0]) if others else "unknown"


def installed() -> dict[str, str]:
    """``{name: version}`` of every installed framework."""
    versions = {name: installed_version(name) for name in DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version is not None}


def examine(names: Sequence[str]) -> dict[str, Framework | BuildError]:
    """Import each framework in a process of its own, side by side; what cannot be imported comes back as its error."""
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return dict(zip(names, pool.map(_examine_one, names), strict=True))


def _examine_one(name: str) -> Framework | BuildError:
    answer = ask([sys.executable, "-c", _QUESTIONS[name].replace("MARK", repr(_MARK))], timeout_s=300)
    try:
        return read_answer(name, answer)
    except BuildError as error:
        return error


def read_answer(name: str, answer: Answer) -> Framework:
    """Turn the output of a framework's question into a :class:`Framework`. Raises ``BuildError`` with its last line."""
    marked = [line for line in answer.output.splitlines() if line.startswith(_MARK)]
    if not answer.ok or not marked:
        last = (answer.output.strip().splitlines() or ["no output"])[-1]
        raise BuildError(f"importing {name} fails: {last}")
    told = json.loads(marked[-1][len(_MARK) :])
    include = [Path(folder) for folder in told["include"]]
    standard = torch_standard(include[0]) if name == "torch" else flags_standard(told["flags"])
    return Framework(name, told["version"], standard, told["cuda"], name != "tensorflow" or has_xla_headers(include[0]))


def torch_standard(include: Path) -> int:
    """The C++ standard torch's headers ask for, from the ``#error`` guard at their top; 14 where there is none."""
    for header in ("torch/csrc/api/include/torch/all.h", "ATen/ATen.h"):
        path = include / header
        found = re.search(r"__cplusplus < (20\d\d)\d\dL", path.read_text()) if path.is_file() else None
        if found:
            return int(found[1]) % 100
    return 14


def flags_standard(flags: Sequence[str]) -> int:
    """The C++ standard in a list of compiler flags (TensorFlow's own), 14 where none is named."""
    found = [re.fullmatch(r"-?-std=(?:c|gnu)\+\+(\d\w)", flag) for flag in flags]
    names = {"1z": 17, "2a": 20, "2b": 23}
    return max((names.get(m[1]) or int(m[1]) for m in found if m and (m[1] in names or m[1].isdigit())), default=14)


def has_xla_headers(include: Path) -> bool:
    """Whether ``xla_mpi_ops.cc`` can be compiled: the header it names, and one that TensorFlow's own headers reach.

    TensorFlow 2.21 has moved the first to xla/ and keeps the second under external/, off its include path.
    """
    needed = ("tensorflow/compiler/xla/client/xla_builder.h", "highwayhash/arch_specific.h")
    return all((include / name).is_file() for name in needed)

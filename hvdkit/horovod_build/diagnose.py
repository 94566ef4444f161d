"""Finds the first real error in a build log: the one that the others follow from."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ERRORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"^[^\s:][^:]*:\d+(?::\d+)?: (?:fatal )?error: ",  # GCC, Clang, nvcc
        r"^[^\s:(][^:(]*\(\d+\): (?:catastrophic )?error",  # nvcc's front end
        r"(?:fatal error|error): Killed signal terminated program",
        r"virtual memory exhausted|out of memory allocating",
        r"No space left on device",
        r"^CMake Error\b",
        r"^CMake was unable to find|^Could NOT find .* \(missing",
        r": undefined reference to ",
        r"\bld(?:\.\w+)?: (?:cannot find|error:|.*file not recognized)",
        r"^nvcc fatal",
        r"^make(?:\[\d+\])?: \*\*\* No rule to make target",
        r"^(?:/bin/)?(?:ba)?sh: .*: (?:command )?not found",
    )
)
_PYTHON_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b(?:: |$)")
_CONTEXT = 12  # lines after the error, at most

_HINTS = (
    (
        r"Killed signal|virtual memory exhausted|out of memory allocating",
        "the compiler ran out of memory: close other programs, or give the machine swap",
    ),
    (r"No space left on device", "free some disk, or point XDG_CACHE_HOME and TMPDIR to a disk with 3 GB free"),
    (
        r"#error .*C\+\+ ?\d\d|need C\+\+\d\d",
        "the framework's headers ask for a newer C++ standard than the build used: report it with the log",
    ),
    (r"Python\.h: No such file", "install the headers of this Python (python3-dev)"),
    (
        r"mpi\.h: No such file|Could NOT find MPI|Could NOT find MPI_",
        "this MPI has no usable mpicxx: name another with --mpi PREFIX, or --mpi none",
    ),
    (r"Compatibility with CMake < 3\.5", "python -m pip install 'cmake<4'"),
)


def first_error(lines: Sequence[str]) -> list[str]:
    """The first real error with the lines that explain it; the last lines of the log where nothing looks like one.

    A compiler's or CMake's error wins over the Python traceback that ends the log, wherever both stand.
    """
    clean = [line.rstrip() for line in lines]
    for index, line in enumerate(clean):
        if any(pattern.search(line) for pattern in _ERRORS):
            return _with_context(clean, index)
    for index, line in enumerate(clean):
        if _PYTHON_ERROR.search(line):
            return clean[max(0, index - 3) : index + 1]
    return [line for line in clean if line][-8:]


def _with_context(lines: Sequence[str], index: int) -> list[str]:
    """The error's own lines: the source line and caret under a compiler's error, the block under CMake's."""
    found = [lines[index]]
    cmake = lines[index].startswith("CMake Error")
    for line in lines[index + 1 : index + 1 + _CONTEXT]:
        if cmake:
            if line and not line.startswith(" "):
                break
        elif not re.match(r"\s+(\d+ )?\||\s*\^|\s{4,}\S", line):
            break
        found.append(line)
    while not found[-1]:
        found.pop()
    return found


def hint(error: Sequence[str]) -> str:
    """What to do about an error that is known; empty for any other."""
    text = "\n".join(error)
    return next((advice for pattern, advice in _HINTS if re.search(pattern, text)), "")

"""The named edits that make Horovod 0.28.1 build and run with today's tools: what, why, and for which versions.

Every edit replaces a text that must occur exactly once in its file. Where it does not, the source is not the one the
edit was written for, and the build stops before anything is compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError

HOROVOD_VERSION = "0.28.1"


@dataclass(frozen=True)
class Situation:
    """What decides which edits apply. A standard is 0 where its framework is not built for."""

    torch_standard: int = 0
    tensorflow_standard: int = 0
    xla_headers: bool = True

    @property
    def root_standard(self) -> int:
        return max(17, self.torch_standard, self.tensorflow_standard)


@dataclass(frozen=True)
class Edit:
    """One change to one file. ``@NAME@`` in ``new`` stands for a number of the situation."""

    name: str
    file: str
    old: str
    new: str
    why: str
    versions: str
    when: Callable[[Situation], bool] = lambda situation: True


EDITS: tuple[Edit, ...] = (
    Edit(
        "cxx-standard-root",
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)\n",
        "set(CMAKE_CXX_STANDARD @ROOT@)\n",
        "Gloo and the CUDA kernels are compiled with the highest C++ standard that a framework asks for, not 14",
        "torch >= 2.1, TensorFlow >= 2.10",
    ),
    Edit(
        "cxx-standard-torch",
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)\n",
        "    set(CMAKE_CXX_STANDARD @TORCH@)\n",
        "torch's headers stop with an #error below the standard they ask for",
        "torch >= 2.1",
        lambda s: s.torch_standard > 14,
    ),
    Edit(
        "cxx-standard-tensorflow",
        "horovod/tensorflow/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 17)\n",
        "    set(CMAKE_CXX_STANDARD @TENSORFLOW@)\n",
        "TensorFlow's own compile flags ask for more than C++17",
        "a TensorFlow that asks for C++20 or newer",
        lambda s: s.tensorflow_standard > 17,
    ),
    Edit(
        "tensorflow-without-xla",
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "this source names headers of XLA that TensorFlow has moved; without it, Horovod's operations cannot be"
        " compiled into XLA programs, which needs CUDA",
        "TensorFlow without tensorflow/compiler/xla/client or highwayhash on its include path (2.21)",
        lambda s: s.tensorflow_standard > 0 and not s.xla_headers,
    ),
    Edit(
        "gloo-cmake-minimum",
        "third_party/gloo/CMakeLists.txt",
        "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        "cmake_minimum_required(VERSION 3.10 FATAL_ERROR)",
        "CMake 4 refuses a minimum below 3.5; with 3.13 or more option() would behave differently",
        "CMake >= 4.0",
    ),
    Edit(
        "cstdint",
        "CMakeLists.txt",
        'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -pthread -fPIC -Wall -ftree-vectorize")',
        'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -pthread -fPIC -Wall -ftree-vectorize -include cstdint")',
        "Gloo and Horovod use uint8_t without <cstdint>, which GCC's own headers no longer bring along",
        "GCC >= 13",
    ),
    Edit(
        "python-include",
        "horovod/torch/CMakeLists.txt",
        '"from distutils.sysconfig import get_python_inc; print(get_python_inc())"',
        "\"import sysconfig; print(sysconfig.get_path('include'))\"",
        "distutils is no longer part of Python",
        "Python >= 3.12",
        lambda s: s.torch_standard > 0,
    ),
    Edit(
        "jsrun-distutils",
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        "horovodrun imports this module, and distutils is no longer part of Python",
        "Python >= 3.12 without setuptools",
    ),
    Edit(
        "mpi-as-probed",
        "CMakeLists.txt",
        "    find_package(MPI ${MPI_REQUIRED})\n",
        '    set(MPI_C_COMPILER "$ENV{HVDKIT_MPICC}" CACHE FILEPATH "" FORCE)\n'
        '    set(MPI_CXX_COMPILER "$ENV{HVDKIT_MPICXX}" CACHE FILEPATH "" FORCE)\n'
        "    find_package(MPI ${MPI_REQUIRED})\n",
        "CMake takes whichever MPI it finds first; it must be the one whose mpirun starts the job",
        "all",
    ),
    Edit(
        "library-path",
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVDKIT_RPATH}")\n',
        "the libraries find this environment's MPI by themselves, and no folder of the build stays in them",
        "all",
    ),
    Edit(
        "release-build",
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        "the same -O3 without debug information: less time, memory and disk",
        "all",
    ),
    Edit(
        "no-eggs",
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "setuptools would download packages into the source folder; what is needed is checked before",
        "all",
    ),
    Edit(
        "no-cffi",
        "setup.py",
        "    require_list.append('cffi>=1.4.0')",
        "    pass",
        "no line of Horovod imports cffi any more, so the wheel must not ask for it",
        "all",
    ),
    Edit(
        "horovodrun-open-mpi-5",
        "horovod/runner/mpi_run.py",
        "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']",
        "_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']",
        "horovodrun --mpi: the launcher takes these options with two dashes only",
        "Open MPI >= 5.0.10",
    ),
    Edit(
        "horovodrun-mpich",
        "horovod/runner/mpi_run.py",
        "        elif 'MPICH' in output:\n",
        "        elif 'MPICH' in output or 'HYDRA' in output:\n",
        "horovodrun --mpi: MPICH's launcher names only itself, so horovodrun finds no MPI",
        "MPICH >= 4",
    ),
)


def situation_edits(situation: Situation, table: Iterable[Edit] = EDITS) -> tuple[Edit, ...]:
    """The edits that apply, with the numbers of the situation filled in."""
    numbers = {
        "@ROOT@": situation.root_standard,
        "@TORCH@": situation.torch_standard,
        "@TENSORFLOW@": situation.tensorflow_standard,
    }
    chosen = []
    for edit in table:
        if edit.when(situation):
            new = edit.new
            for mark, number in numbers.items():
                new = new.replace(mark, str(number))
            chosen.append(Edit(edit.name, edit.file, edit.old, new, edit.why, edit.versions))
    return tuple(chosen)


def digest(edits: Iterable[Edit]) -> str:
    """Short hash over all that the edits change, for the cache key."""
    text = "\0".join(part for edit in edits for part in (edit.name, edit.file, edit.old, edit.new))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def apply(root: Path, edits: Iterable[Edit]) -> None:
    """Edit the tree at ``root``. Raises ``BuildError`` and writes nothing unless every edit matches exactly once."""
    texts: dict[str, str] = {}
    for edit in edits:
        path = root / edit.file
        if edit.file not in texts:
            texts[edit.file] = path.read_text() if path.is_file() else ""
        count = texts[edit.file].count(edit.old)
        if count != 1:
            raise BuildError(
                f"edit {edit.name} must match {edit.file} exactly once, but matches {count} times: "
                f"{edit.old.strip()!r}\n"
                f"  this is not the source of Horovod {HOROVOD_VERSION} that the edit was written for\n"
                "  fix: remove the cached sdist (--dry-run shows where) and run this again"
            )
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    for file, text in texts.items():
        (root / file).write_text(text)

"""What a GPU build needs: a CUDA build of every framework, nvcc, and NCCL with its headers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.horovod_build.frameworks import Framework
from hvdkit.horovod_build.toolchain import Need, find_tool

NONE, NCCL = "none", "nccl"


@dataclass(frozen=True)
class Gpu:
    """The GPU side of a build: ``mode`` none or nccl, the variables it sets, and what it lacks."""

    mode: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()


def nccl_home() -> Path | None:
    """Folder with ``include/nccl.h`` and ``lib``: ``HOROVOD_NCCL_HOME``, the nvidia-nccl wheel's, or the system's."""
    folders = [Path(os.environ["HOROVOD_NCCL_HOME"])] if os.environ.get("HOROVOD_NCCL_HOME") else []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders.append(Path(root) / "nccl")
    folders += [Path("/usr/local/cuda"), Path("/usr/local"), Path("/usr")]
    return next((folder for folder in folders if (folder / "include" / "nccl.h").is_file()), None)


def cuda_home() -> Path | None:
    """Folder of the CUDA toolkit: ``HOROVOD_CUDA_HOME``, ``CUDA_HOME``, where nvcc on PATH lies, or /usr/local/cuda."""
    named = [os.environ[v] for v in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if os.environ.get(v)]
    nvcc = find_tool(("nvcc",))
    folders = [Path(n) for n in named] + ([nvcc.resolve().parent.parent] if nvcc else []) + [Path("/usr/local/cuda")]
    return next((folder for folder in folders if (folder / "bin" / "nvcc").is_file()), None)


def choose(choice: str, frameworks: Iterable[Framework]) -> Gpu:
    """Resolve ``--gpu auto|none|nccl``. ``auto`` takes NCCL only where nothing is missing for it."""
    if choice == NONE:
        return Gpu(NONE)
    wanted = with_nccl(list(frameworks))
    return wanted if choice == NCCL or not wanted.needs else Gpu(NONE)


def with_nccl(frameworks: list[Framework]) -> Gpu:
    """The NCCL build, with everything missing for it at once."""
    needs = [
        Need(
            f"GPU build of {framework.name}",
            f"--gpu nccl: {framework.name} {framework.version} is a CPU build",
            f"install a CUDA build of {framework.name}, or use --gpu none",
        )
        for framework in frameworks
        if framework.cuda is None
    ]
    cuda, nccl = cuda_home(), nccl_home()
    if cuda is None:
        needs.append(Need("nvcc", "--gpu nccl: no CUDA toolkit found", "install it, or set HOROVOD_CUDA_HOME"))
    if nccl is None:
        remedy = "python -m pip install nvidia-nccl-cu12 (the number of your CUDA), or set HOROVOD_NCCL_HOME"
        needs.append(Need("NCCL", "--gpu nccl: no nccl.h found", remedy))
    environment = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    if cuda is not None:
        environment["HOROVOD_CUDA_HOME"] = str(cuda)
    if nccl is not None:
        environment["HOROVOD_NCCL_HOME"] = str(nccl)
        # The wheel carries the shared library alone; Horovod looks for the static one first.
        environment["HOROVOD_NCCL_LINK"] = "SHARED"
    return Gpu(NCCL, environment, tuple(needs))


def link_nccl(home: Path, folder: Path) -> Path:
    """A folder like ``home`` that the linker can use: the wheel has ``libnccl.so.2`` but no ``libnccl.so``."""
    libraries = sorted((home / "lib").glob("libnccl.so*"))
    if not libraries or any(lib.name == "libnccl.so" for lib in libraries):
        return home
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    for name, target in {"include": home / "include", "lib/libnccl.so": libraries[0]}.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    return folder

"""Which environment variables travel to other hosts. docs/launching.md shows this list to users.

Values never stand on a command line: they are put into the launcher's own environment and forwarded by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hvdkit.errors import UsageError

FORWARDED = frozenset(
    (
        "PATH",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONNOUSERSITE",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
    )
)
# fmt: off
FORWARDED_PREFIXES = (
    "HOROVOD_", "HVDKIT_", "NCCL_", "UCX_", "FI_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_",
    "TORCH_", "PYTORCH_", "TF_", "XLA_", "KERAS_", "CUDNN_", "LC_",
)
# fmt: on
# Every host has its own GPUs: the masks of the machine that starts the job mean nothing on another one.
GPU_MASKS = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "ONEAPI_DEVICE_SELECTOR",
    }
)
# What a launcher tells each process; an old value would make it someone else.
_IDENTITY = re.compile(
    r"HOROVOD_(?:RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|GLOO_RENDEZVOUS_.*|CONTROLLER)$"
    r"|TF_CONFIG$|HVDKIT_CHANNEL$|OMPI_(?!MCA_)|PMIX_|PMI_|PRTE_(?!MCA_)|MPI_LOCAL|HYDI?_|HYDRA_|SLURM_|LSB_|PBS_"
)
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|APIKEY|COOKIE|(?:^|_)(?:KEY|AUTH|PWD|PAT)(?:_|S?$)",
    re.IGNORECASE,
)
CHANNEL_VARIABLE = "HVDKIT_CHANNEL"  # leads a rank to the launcher
_GOOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


class Forwarding(NamedTuple):
    """``environ`` is what the launcher runs with, ``names`` what goes to other hosts, ``notes`` lines to show."""

    environ: dict[str, str]
    names: tuple[str, ...]
    notes: tuple[str, ...]


def forwarded_environment(environ: Mapping[str, str], requests: Iterable[str] = ()) -> Forwarding:
    """Choose what is forwarded: the documented set, plus ``requests`` of the forms ``NAME`` and ``NAME=VALUE``.

    Secrets and GPU masks are never taken by the documented set. A request names one variable on purpose, so a secret
    is then forwarded (by name, its value on no command line); a GPU mask is refused.

    Raises:
        UsageError: a request is no variable name, is not set, or is a GPU mask.
    """
    result = {name: value for name, value in environ.items() if _GOOD_NAME.match(name)}
    odd = sorted(name for name in environ if not _GOOD_NAME.match(name))
    asked = [_request(request, result) for request in requests]
    names = sorted({name for name in result if is_forwarded(name)} | set(asked))
    notes = []
    if odd:
        shown = ", ".join(ascii(name)[1:-1] for name in odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
        notes.append(f"not passed to the ranks, since no shell can name them: {shown}")
    secrets = [name for name in asked if is_secret(name)]
    if secrets:
        notes.append(f"forwarded because --env asks for it, though it looks secret: {', '.join(secrets)}")
    return Forwarding(result, tuple(names), tuple(notes))


def is_forwarded(name: str) -> bool:
    """True for a variable of the documented set."""
    if name in GPU_MASKS or is_secret(name) or _IDENTITY.match(name):
        return False
    return name in FORWARDED or name.startswith(FORWARDED_PREFIXES)


def is_secret(name: str) -> bool:
    """True where the name sounds like a password, a key or a token."""
    return _SECRET.search(name) is not None


def without_private(environ: Mapping[str, str], keep: Iterable[str]) -> dict[str, str]:
    """The environment for a launcher that forwards all it has: no secrets, GPU masks or identity unless in ``keep``."""
    kept = set(keep)
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name in GPU_MASKS or is_secret(name) or _IDENTITY.match(name))
    }


def _request(request: str, environ: dict[str, str]) -> str:
    name, equals, value = request.partition("=")
    if not _GOOD_NAME.match(name):
        raise UsageError(
            f"--env {request!r} was given; NAME or NAME=VALUE was expected, NAME of letters, digits and '_'."
        )
    if name in GPU_MASKS:
        raise UsageError(
            f"--env {name} would hide GPUs by this machine's numbers on every host; "
            "give each host its own in the hostfile, e.g. `node1 gpus=0,2`."
        )
    if _IDENTITY.match(name):
        raise UsageError(f"--env {name}: the launcher sets this for each rank; it cannot be forwarded.")
    if equals:
        if "\0" in value:
            raise UsageError(f"--env {name}: the value has a NUL character.")
        environ[name] = value
    elif name not in environ:
        raise UsageError(f"--env {name} was given, but {name} is not set here: set it, or write --env {name}=VALUE.")
    return name

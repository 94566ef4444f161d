"""Who am I: rank, size, local and cross numbers, and what the launcher declared in the environment.

A job of N processes that runs as N jobs of one process looks healthy and trains wrong. So the size that Horovod
reports is compared with the size that the launcher put into the environment (:func:`check_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import WorldError


@dataclass(frozen=True)
class World:
    """The numbers of this process in its job, as Horovod knows them after ``init()``.

    ``rank`` is in ``[0, size)`` and unique in the job; ``local_rank`` is in ``[0, local_size)`` and unique on its
    host; ``cross_rank`` numbers the hosts that have this local rank, in ``[0, cross_size)``. ``device`` is what the
    framework should compute on (``torch.device`` or a TensorFlow device name), ``launcher`` who started the process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    device: Any = "cpu"
    launcher: str = "none"

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one rank that prints and writes."""
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """The environment variables that one launcher family sets for every process."""

    name: str
    size: tuple[str, ...]  # the first one that is set counts
    rank: tuple[str, ...]
    remedy: str


# In order of trust: the innermost launcher wins, e.g. mpirun inside a Slurm allocation.
LAUNCHERS = (
    Launcher("horovodrun", ("HOROVOD_SIZE",), ("HOROVOD_RANK",), "start it again with horovodrun or `hvdkit run`"),
    Launcher(
        "Open MPI mpirun",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_RANK",),
        "Horovod must be built against this very Open MPI: run `hvdkit doctor`, then `hvdkit install-horovod`",
    ),
    Launcher(
        "MPICH or Intel mpiexec",
        ("PMI_SIZE",),
        ("PMI_RANK",),
        "Horovod must be built against this very MPI: run `hvdkit doctor`, then `hvdkit install-horovod`",
    ),
    Launcher(
        "Slurm",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_PROCID",),
        "start the script with `hvdkit run`, mpirun or `srun --mpi=…`; for one process on purpose use `srun -n 1`",
    ),
)


@dataclass(frozen=True)
class Declared:
    """What the launcher says about this process; ``rank`` is None where it does not say."""

    launcher: Launcher
    size: int
    rank: int | None
    size_variable: str


def declared_world(environ: Mapping[str, str]) -> Declared | None:
    """Read what the launcher declared; None if no launcher left a trace (or the job is elastic: its size changes).

    Raises:
        WorldError: a variable is not a number in range, or a rank is given without a size.
    """
    if environ.get("HOROVOD_ELASTIC") == "1":
        return None
    for launcher in LAUNCHERS:
        size_variable = _first_set(launcher.size, environ)
        rank_variable = _first_set(launcher.rank, environ)
        if size_variable is None:
            if rank_variable is not None:
                raise WorldError(
                    f"{rank_variable}={environ[rank_variable]} is set but none of {', '.join(launcher.size)}: "
                    f"half of what {launcher.name} sets. {_capital(launcher.remedy)}, or unset {rank_variable}."
                )
            continue
        size = _number(size_variable, environ, low=1)
        rank = None if rank_variable is None else _number(rank_variable, environ, low=0)
        if rank is not None and rank >= size:
            raise WorldError(
                f"{rank_variable}={rank} does not fit {size_variable}={size}: ranks go from 0 to {size - 1}."
            )
        return Declared(launcher, size, rank, size_variable)
    return None


def check_size(actual_size: int, environ: Mapping[str, str]) -> Declared | None:
    """Compare Horovod's size with the one that the launcher declared; returns what was declared.

    Raises:
        WorldError: the two differ, with both numbers and what to do.
    """
    declared = declared_world(environ)
    if declared is not None and declared.size != actual_size:
        raise WorldError(
            f"Horovod runs {actual_size} process{'es' if actual_size != 1 else ''} in this job, but "
            f"{declared.launcher.name} declared {declared.size} ({declared.size_variable}={declared.size}). "
            f"Each process would train alone on its own part of the data. {_capital(declared.launcher.remedy)}."
        )
    return declared


def _first_set(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if environ.get(name, "") != ""), None)


def _number(name: str, environ: Mapping[str, str], low: int) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()) or int(text) < low:
        raise WorldError(f"{name}={environ[name]!r} was given; a whole number of at least {low} was expected.")
    return int(text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

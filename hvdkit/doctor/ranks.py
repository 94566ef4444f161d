"""Checks with two ranks on this machine: bare MPI first, then Horovod in every framework under every controller."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdkit.doctor.check import Check
from hvdkit.doctor.probe import MARK
from hvdkit.errors import BuildError, LaunchError
from hvdkit.horovod_build import prove
from hvdkit.horovod_build import stamp as stamps
from hvdkit.horovod_build.process import ask
from hvdkit.launch import mpi

PROBE_TIMEOUT_S = 60.0
REBUILD = "hvdkit install-horovod --force"


def check_ranks(tell: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Start two ranks in every way that this installation has. ``tell`` hears what is being tried."""
    try:
        launcher: Path | None = Path(mpi.find_mpirun().path)
    except LaunchError:
        launcher = None  # the machine's checks say so
    if launcher is not None:
        tell("2 ranks of mpi4py")
        yield check_mpi(launcher)
    try:
        stamp = stamps.read_stamp()
    except BuildError:
        return
    if stamp is not None:
        for name in stamp.frameworks:
            yield from _check_framework(name, stamp.controllers, launcher, tell)


def check_mpi(launcher: Path, ranks: int = 2) -> Check:
    """mpi4py under ``launcher``: does it find its peers, in the library that the launcher belongs to?"""
    argv = [*prove.launch_words("mpi", launcher)[:-1], str(ranks), sys.executable, "-m", "hvdkit.doctor.probe"]
    answer = ask(argv, env=prove.proof_environment(), timeout_s=PROBE_TIMEOUT_S)
    lines = [line.split(MARK, 1)[1] for line in answer.output.splitlines() if MARK in line]
    name = f"mpi4py on {ranks} ranks"
    if not lines:
        last = (answer.output.strip().splitlines() or ["no output"])[-1]
        remedy = f"install mpi4py (python -m pip install mpi4py); see the whole output of: {' '.join(argv)}"
        return Check(name, "failed", f"exit code {answer.code}: {last}", remedy)
    told = [json.loads(line) for line in lines]
    if len(told) != 1 or len(told[0]["ranks"]) != ranks:
        text = (
            f"{len(told)} jobs of {len(told[0]['ranks'])} process(es): mpi4py loads another MPI than {launcher} starts"
        )
        return Check(name, "failed", text, "keep one MPI in this environment, or set MPI4PY_MPIABI / MPI4PY_LIBMPI")
    unlike = differences(told[0]["ranks"])
    if unlike:
        return Check(name, "failed", unlike[0], "install the same versions for every rank")
    latency_us = told[0]["allreduce_8_bytes_s"] * 1e6
    bandwidth = told[0]["allreduce_16_mib_bus_bytes_per_s"] / 1e9
    library = told[0]["ranks"][0]["mpi"]
    return Check(name, "ok", f"{library}; all-reduce of 8 bytes {latency_us:.1f} us, of 16 MiB {bandwidth:.2f} GB/s")


def differences(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """What rank 0 and another rank do not share: Python, package versions, MPI; one line each, with rank and host."""
    found = []
    first = ranks[0]
    for number, other in enumerate(ranks[1:], 1):
        pairs = [(key, first[key], other[key]) for key in ("python", "mpi")]
        names = sorted({*first["versions"], *other["versions"]})
        pairs += [(n, first["versions"].get(n, "none"), other["versions"].get(n, "none")) for n in names]
        found += [
            f"{name}: {a} on rank 0 ({first['host']}), {b} on rank {number} ({other['host']})"
            for name, a, b in pairs
            if a != b
        ]
    return found


def _check_framework(
    name: str, controllers: Sequence[str], launcher: Path | None, tell: Callable[[str], None]
) -> Iterator[Check]:
    tell(f"import horovod.{name}")
    title = f"horovod.{name}"
    try:
        prove.check_import(name, controllers)
    except BuildError as error:
        yield Check(f"{title} imports", "failed", _short(error), REBUILD)
        return
    yield Check(f"{title} imports", "ok", f"with {', '.join(controllers)}")
    for controller in controllers:
        starter = "mpirun" if controller == "mpi" else "horovodrun"
        line = f"{title} on 2 ranks, {starter}"
        if controller == "mpi" and launcher is None:
            yield Check(line, "failed", "Horovod was built with MPI, and there is no mpirun", "install that MPI again")
            continue
        tell(f"2 ranks of horovod.{name} over {controller}")
        try:
            prove.check_allreduce(name, controller, launcher)
        except BuildError as error:
            yield Check(line, "failed", _short(error), REBUILD)
        else:
            yield Check(line, "ok", "the sum of [rank + 1] is 3 on both")


def _short(error: BuildError) -> str:
    """The first line and the last: what failed, and how it ended."""
    lines = str(error).splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"

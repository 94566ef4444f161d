"""``hvdkit install-horovod``: build, install and prove Horovod for this environment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click


@click.command("install-horovod")
@click.option(
    "--with", "with_", metavar="NAMES", help="torch, tensorflow, or both with a comma [default: those installed]"
)
@click.option(
    "--mpi", default="auto", show_default=True, metavar="auto|none|PATH", help="MPI: found, none, or a prefix"
)
@click.option(
    "--gpu", default="auto", show_default=True, type=click.Choice(["auto", "none", "nccl"]), help="GPU operations"
)
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@click.option("--force", is_flag=True, help="Build again, whatever is installed or cached.")
def command(with_: str | None, mpi: str, gpu: str, dry_run: bool, force: bool) -> None:
    """Build Horovod 0.28.1 for the torch, TensorFlow and MPI of this environment, install it, and prove that it works.

    Everything that is missing is listed at once, before anything is compiled. The finished wheel is cached.
    """
    from hvdkit.horovod_build import build, frameworks
    from hvdkit.horovod_build.probe import Request

    names = frameworks.parse_names(with_) if with_ is not None else None
    request = Request(names, mpi, gpu, force)
    with _polite_end_as_interrupt():
        (build.plan_only if dry_run else build.install_horovod)(request, click.echo)


@contextmanager
def _polite_end_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM and a closed terminal's SIGHUP clean up as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

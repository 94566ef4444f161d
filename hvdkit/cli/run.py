"""``hvdkit run``: start a command on all ranks of a host list."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from hvdkit.cli.built import horovod_mpi, mismatch
from hvdkit.cli.hostoptions import host_options
from hvdkit.errors import LaunchError, UsageError
from hvdkit.launch.command import Binding, Command, JobRequest, build_command, remote_hosts
from hvdkit.launch.environment import forwarded_environment
from hvdkit.launch.mpi import Launcher, find_horovodrun, find_mpirun, identify
from hvdkit.launch.placement import Placement, place
from hvdkit.launch.program import resolve_command
from hvdkit.launch.sources import find_hosts


class _SplitCommand(click.Command):
    """Takes everything after the first ``--`` as the user's command, and names a stray word before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, after = args, None
        if "--" in args:
            split = args.index("--")
            before, after = args[:split], args[split + 1 :]
        ctx.meta["hvdkit.after"] = after
        rest = super().parse_args(ctx, before)
        words = list(ctx.params["command"])
        if after is not None:
            if words:
                raise UsageError(f"stray word {words[0]!r} before `--`; a list of hosts is one word: -H n1:2,n2:4")
            ctx.params["command"] = tuple(after)
        return rest


@click.command(
    "run",
    cls=_SplitCommand,
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
)
@host_options
@click.option(
    "--launcher",
    type=click.Choice(["auto", "mpirun", "horovodrun"]),
    default="auto",
    help="auto: mpirun where Horovod has MPI.",
)
@click.option("--launcher-path", metavar="FILE", help="The mpirun or horovodrun to use.")
@click.option(
    "--launcher-arg",
    "launcher_args",
    multiple=True,
    metavar="ARG",
    help="One more argument for the launcher; repeat it for more.",
)
@click.option(
    "--env", "env", multiple=True, metavar="NAME[=VALUE]", help="Forward one more variable; repeat it for more."
)
@click.option("--ssh-port", type=int, metavar="PORT")
@click.option("--ssh-identity", metavar="FILE", help="Private key for ssh.")
@click.option("--ssh-user", metavar="NAME")
@click.option("--interface", metavar="NAME", help="Network interface between the hosts.")
@click.option(
    "--bind",
    type=click.Choice(["none", "core", "socket", "numa"]),
    default="none",
    help="Bind each rank (default: none).",
)
@click.option("--tag-output", is_flag=True, help="Begin each line with its rank.")
@click.option("--log-dir", metavar="DIR", help="Also write each rank's output to DIR/rank-N.log.")
@click.option(
    "--dry-run", is_flag=True, help="Print the command, the host file and the forwarded variables; start nothing."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(command: tuple[str, ...], dry_run: bool, **options: Any) -> int:
    """Start COMMAND on all ranks, e.g. `hvdkit run -np 2 -- python train.py`.

    Without a host list the ranks run on this machine. The exit code is that of the first rank that failed.
    """
    pool = find_hosts(
        os.environ,
        hostfile=options["hostfile"],
        hosts=options["hosts"],
        ranks=options["ranks"],
        source=options["source"],
        default_slots=options["slots_per_host"],
        include=options["include"],
        exclude=options["exclude"],
        skip_launch_host=options["skip_launch_host"],
    )
    placement = place(pool, options["ranks"])
    words = resolve_command(command)
    launcher = _choose_launcher(options["launcher"], options["launcher_path"])
    request = _request(launcher, placement, words, options)
    for note in filter(None, [*pool.warnings, mismatch(launcher.family)]):
        _note(note)
    if dry_run:
        _show(build_command(request, f"{tempfile.gettempdir()}/hvdkit-XXXXXX/hosts"), request)
        return 0
    with tempfile.TemporaryDirectory(prefix="hvdkit-") as folder:
        path = Path(folder) / "hosts"
        built = build_command(request, str(path))
        path.write_text(built.hostfile, encoding="ascii")
        for note in built.notes:
            _note(note)
        from hvdkit.launch.execute import run_job  # loads psutil, which --help and --dry-run can do without

        return run_job(built.argv, built.environ, [rank.host for rank in placement.ranks], request.remote_hosts)


def _request(launcher: Launcher, placement: Placement, words: tuple[str, ...], options: dict[str, Any]) -> JobRequest:
    bind: Binding = options["bind"]
    return JobRequest(
        launcher=launcher,
        placement=placement,
        command=words,
        forwarding=forwarded_environment(os.environ, options["env"]),
        remote_hosts=remote_hosts(placement),
        ssh_port=options["ssh_port"],
        ssh_identity=options["ssh_identity"],
        ssh_user=options["ssh_user"],
        interface=options["interface"],
        bind=bind,
        tag_output=options["tag_output"],
        log_dir=options["log_dir"],
        launcher_arguments=options["launcher_args"],
        cores=len(os.sched_getaffinity(0)),
        is_root=os.geteuid() == 0,
    )


def _choose_launcher(wanted: str, path: str | None) -> Launcher:
    """The launcher asked for; ``auto`` is mpirun where Horovod was built with MPI or is not there, else horovodrun."""
    if path is not None:
        if wanted == "horovodrun" or (wanted == "auto" and Path(path).name == "horovodrun"):
            return find_horovodrun(path)
        return identify(path)
    if wanted == "mpirun":
        return find_mpirun()
    if wanted == "horovodrun":
        return find_horovodrun()
    if horovod_mpi() == "none":
        return find_horovodrun()
    try:
        return find_mpirun()
    except LaunchError as no_mpirun:
        try:
            return find_horovodrun()
        except LaunchError as no_horovodrun:
            raise LaunchError(f"{no_mpirun} And {no_horovodrun}") from no_horovodrun


def _show(built: Command, request: JobRequest) -> None:
    click.echo(shlex.join(built.argv))
    click.echo(f"\n# the host file, for {request.launcher.text}:")
    click.echo(built.hostfile, nl=False)
    click.echo("\n# variables that travel to other hosts:")
    click.echo(" ".join(request.forwarding.names))
    for note in built.notes:
        click.echo(f"# {note}")


def _note(text: str) -> None:
    print(f"hvdkit: {text}", file=sys.stderr)

"""Entry point of the ``hvdkit`` command. Subcommands are imported only when they are called, to start fast."""

from __future__ import annotations

import importlib
import sys

import click

import hvdkit
from hvdkit.errors import HvdkitError

# name -> (module with a click command called `command`, the line that `hvdkit --help` shows)
COMMANDS = {
    "doctor": ("hvdkit.cli.doctor", "Check this environment and say what to repair."),
    "hosts": ("hvdkit.cli.hosts", "Show a host list and the ranks it gives, or write it in another spelling."),
    "install-horovod": ("hvdkit.cli.install_horovod", "Build and install Horovod for this environment."),
    "run": ("hvdkit.cli.run", "Start a training script on all ranks of a host list."),
}


class _LazyGroup(click.Group):
    """A click group that knows its commands by name and loads one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hvdkit.__version__, prog_name="hvdkit")
def cli() -> None:
    """Horovod for today's PyTorch and TensorFlow: it installs, it launches, it trains right."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 it failed, 2 it was not understood, 130 interrupted."""
    try:
        code = cli.main(args=argv, prog_name="hvdkit", standalone_mode=False)
    except HvdkitError as error:
        click.echo(f"hvdkit: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("hvdkit: interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)

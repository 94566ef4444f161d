"""``hvdkit doctor``: check this environment, and say what to repair."""

from __future__ import annotations

import json

import click

from hvdkit.doctor.check import Check, report

MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "red")}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quick", is_flag=True, help="Leave out the checks that start two ranks.")
def command(as_json: bool, quick: bool) -> int:
    """Check this environment: versions, what Horovod was built with, launchers, and two ranks that talk.

    The exit code is 1 if a check failed; each failure comes with its remedy.
    """
    from hvdkit.doctor.checks import check_machine
    from hvdkit.doctor.ranks import check_ranks

    checks = check_machine()
    if not quick:
        checks += check_ranks(lambda text: click.echo(f"doctor: {text} …", err=True))
    told = report(checks)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        _show(checks)
    return 0 if told["ok"] else 1


def _show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "found")
    for check in checks:
        mark, colour = MARKS[check.status]
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n-> {check.remedy}", style=colour)
        table.add_row(Text(check.name), Text(mark, style=colour), found)
    console = Console()
    console.print(table)
    failed = sum(check.status == "failed" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed, {warnings} with a warning")

"""The exception family of hvdkit. This module imports nothing.

Every message says what was given, what was expected and what to do. ``exit_code`` is what the command line
returns for an error of that kind: 2 for a request that cannot be understood, 1 for one that failed.
"""

from __future__ import annotations


class HvdkitError(Exception):
    """Base of every error that hvdkit raises on purpose."""

    exit_code = 1


class UsageError(HvdkitError, ValueError):
    """A value given by the user is not acceptable (also a ``ValueError``)."""

    exit_code = 2


class HostfileError(UsageError):
    """A host list cannot be read. Knows where: ``source`` (file or option), ``line`` and ``column`` from 1."""

    def __init__(
        self,
        problem: str,
        *,
        source: str,
        line: int | None = None,
        column: int | None = None,
        text: str = "",
        fix: str = "",
    ) -> None:
        self.problem, self.source, self.line, self.column, self.text, self.fix = (
            problem,
            source,
            line,
            column,
            text,
            fix,
        )
        where = source
        if line is not None:
            where += f":{line}" + (f":{column}" if column is not None else "")
        message = f"{where}: {problem}"
        if text:
            message += f"\n  {text}"
            if column is not None:
                message += "\n  " + " " * (column - 1) + "^"
        if fix:
            message += f"\n  fix: {fix}"
        super().__init__(message)


class PlacementError(UsageError):
    """The ranks asked for do not fit on the hosts given."""


class LaunchError(HvdkitError):
    """A job could not be started: no usable launcher, no such script, a host that cannot be reached."""


class BuildError(HvdkitError):
    """Horovod could not be built, installed or proven to work."""


class NotInstalledError(BuildError, ImportError):
    """Something that is needed is not installed (also an ``ImportError``)."""


class WorldError(HvdkitError):
    """The processes that run are not the job that the launcher declared."""


class OutOfSyncError(HvdkitError):
    """Ranks that must agree do not: weights, signatures, settings. The message names the first difference."""


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written, read, or does not belong to this training."""

"""Rank-aware logging: rank 0 speaks, the others keep quiet unless something is wrong.

Nothing here communicates, so every helper may be called on any subset of ranks. The rank is taken from the
environment that the launcher set until :func:`set_rank` tells it for certain.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from hvdkit.world import LAUNCHERS

_RANK_NAMES = tuple(name for launcher in LAUNCHERS for name in launcher.rank)
_known_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Fix the rank that log lines carry; ``None`` goes back to what the environment says."""
    global _known_rank
    _known_rank = rank


def current_rank() -> int:
    """This process's rank: what :func:`set_rank` was told, else the launcher's variable, else 0."""
    if _known_rank is not None:
        return _known_rank
    for name in _RANK_NAMES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


class _RankFilter(logging.Filter):
    """Passes everything on rank 0 and only warnings and worse elsewhere; adds ``record.rank``."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = record.__dict__["rank"] = current_rank()
        return rank == 0 or record.levelno >= logging.WARNING


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class _CurrentStderr(_StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection and pytest's capture work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger(name: str = "hvdkit") -> logging.Logger:
    """The logger of hvdkit or one of its parts, with the rank filter in place (level: ``HVDKIT_LOG``, default INFO)."""
    root = logging.getLogger("hvdkit")
    if not root.handlers:
        handler = _CurrentStderr()
        handler.addFilter(_RankFilter())
        handler.setFormatter(logging.Formatter("hvdkit [%(rank)d] %(levelname)s: %(message)s"))
        root.addHandler(handler)
        level = os.environ.get("HVDKIT_LOG", "INFO").upper()
        root.setLevel(level if isinstance(logging.getLevelName(level), int) else "INFO")
        root.propagate = False
    return logging.getLogger(name)


def print_on_rank0(*values: object, sep: str = " ", end: str = "\n") -> None:
    """``print`` to standard output on rank 0 and do nothing elsewhere. Never communicates."""
    if current_rank() == 0:
        sys.stdout.write(sep.join(str(v) for v in values) + end)
        sys.stdout.flush()

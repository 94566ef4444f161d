"""A rank that fails ends the whole job, whoever started it.

Where a rank dies of an uncaught exception or a non-zero ``sys.exit``, its peers would sit in a collective until the
time limit. :func:`install_abort` makes the failing rank say who it is, where it runs and why it stops, and then ends
the job: with ``MPI_Abort`` where Horovod runs on MPI, else by leaving at once, which horovodrun answers by ending the
other ranks. What is *caught* is never touched: ``except SystemExit`` and ``pytest.raises`` work as ever. A bare
``raise SystemExit(3)`` cannot be seen from Python; that process ends as usual and leaves the rest to the launcher.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from hvdkit.log import get_logger

# A rank that fails only because another one left waits this long, so that the first one can name itself.
_CONSEQUENCE_DELAY_S = 2.0
_CONSEQUENCES = ("has been shut down", "HorovodInternalError", "Connection reset by peer", "Connection closed by peer")

_state: _Abort | None = None


class _Abort:
    """The settings of this process, and what was in place before."""

    def __init__(self, mpi: Any, rank: int) -> None:
        self.mpi, self.rank = mpi, rank
        self.pid = os.getpid()  # a forked data-loading worker inherits the hooks but is not the rank
        self.previous_hook, self.previous_exit = sys.excepthook, sys.exit


def install_abort(uses_mpi: bool, rank: int, size: int) -> None:
    """From now on, an uncaught exception or a non-zero ``sys.exit`` in this process ends all ``size`` processes.

    Does nothing for a job of one process, and nothing the second time. ``uses_mpi`` says whether Horovod's controller
    is MPI; then mpi4py does the abort if it is there and talks to the same MPI, without initialising anything.
    """
    global _state
    if size <= 1 or _state is not None:
        return
    _state = _Abort(_shared_mpi() if uses_mpi else None, rank)
    sys.excepthook = _on_exception
    sys.exit = _exit


def uninstall_abort() -> None:
    """Put back what :func:`install_abort` replaced."""
    global _state
    if _state is not None:
        sys.excepthook, sys.exit = _state.previous_hook, _state.previous_exit
        _state = None


def _shared_mpi() -> Any:
    """mpi4py's ``MPI`` if it sees the MPI that Horovod has initialised, else None (then leaving must do)."""
    try:
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False  # Horovod starts and ends MPI
        mpi4py.rc.finalize = False
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as problem:
        get_logger().debug("mpi4py cannot end the job (%s); a failing rank will just leave", problem)
        return None
    # Another MPI library than Horovod's would say that it has not been initialised.
    return mpi if mpi.Is_initialized() and not mpi.Is_finalized() else None


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _state is not None
    _state.previous_hook(kind, error, trace)
    if os.getpid() == _state.pid:
        _end_job(f"{kind.__name__}: {error}", 130 if issubclass(kind, KeyboardInterrupt) else 1)


def _exit(code: Any = None) -> NoReturn:
    """``sys.exit``: raises a ``SystemExit`` that knows when the interpreter itself acts on it."""
    raise _Exit(code) if _exit_status(code) else SystemExit(code)


class _Exit(SystemExit):
    """A failing exit. ``code`` is read by the interpreter, with no Python frame below, only if nobody caught it."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self._code = code

    @property
    def code(self) -> Any:  # type: ignore[override]
        if _state is not None and _state.pid == os.getpid() and sys._getframe().f_back is None:
            _end_job(f"sys.exit({self._code!r})", _exit_status(self._code))
        return self._code


def _exit_status(code: Any) -> int:
    """The process status that Python gives for ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _end_job(reason: str, status: int) -> NoReturn:
    assert _state is not None
    if any(sign in reason for sign in _CONSEQUENCES):
        time.sleep(_CONSEQUENCE_DELAY_S)
        reason += "\n  (this usually follows from another rank's failure: look for the first one above)"
    get_logger().error(
        "rank %d on %s failed and ends the job with status %d: %s", _state.rank, socket.gethostname(), status, reason
    )
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if _state.mpi is not None and not _state.mpi.Is_finalized():
        _state.mpi.COMM_WORLD.Abort(status)
    # Not sys.exit: Horovod's exit handlers would wait for, or wake up, the other ranks.
    os._exit(status)

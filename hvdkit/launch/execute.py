"""Runs a launcher's command, passes signals on, ends the whole job when a rank fails, and says which one it was."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from hvdkit.errors import LaunchError
from hvdkit.launch.environment import CHANNEL_VARIABLE
from hvdkit.launch.reports import RankReport, Reports

GRACE_S = 10.0  # a rank that is told to stop may save its work this long
LINGER_S = 4.0  # after a failure the launcher gets this long to end the job by itself
KILL_S = 5.0
_EXIT_KILLED = 128 + int(signal.SIGKILL)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Job:
    """One launcher process and the ranks behind it."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], reports: Reports) -> None:
        self.reports = reports
        self.stopped_by: int | None = None
        self._pending: list[int] = []
        self._steps: list[tuple[float, Callable[[], None]]] = []  # what to do when, if the job still runs then
        # What mpirun leaves behind (an ssh to a host that is gone) becomes this process's child, to be ended.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self.process = subprocess.Popen(
                list(argv),
                env={CHANNEL_VARIABLE: reports.address, **environ},
                # The launcher is in the background of a terminal, where reading would stop it.
                stdin=subprocess.DEVNULL if _stdin_is_terminal() else None,
                preexec_fn=_new_group_that_dies_with_us(),
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"{argv[0]} cannot be started: {error}") from error
        self._not_ours = {child.pid for child in _children()} - {self.process.pid}

    def run(self) -> int:
        """Wait for the end, acting on signals and failures; returns the launcher's exit code (128 + n for a signal)."""
        with self._signals():
            while self.process.poll() is None:
                self.reports.wait(self._patience())
                self._act_on_signals()
                if not self._steps and self.reports.first_failure() is not None:
                    self._end_after_failure()
                self._act_on_time()
            self._sweep()
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def _patience(self) -> float:
        return 0.25 if self._steps or self.reports.hold_ended else 1.0

    def _act_on_signals(self) -> None:
        while self._pending:
            number = self._pending.pop(0)
            if number in _PASSED_ON:
                self.reports.send(signal=number) if self.reports.running else self._signal_launcher(number)
            elif number in _STOPPING:
                self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        if self.stopped_by is not None:  # the second Ctrl-C: no more grace
            self._steps = []
            self._kill()
            return
        self.stopped_by = number
        now = time.monotonic()
        if self.reports.running:
            self.reports.hold_ended = True
            self.reports.send(stop=number, grace_s=GRACE_S)
            self._steps = [(now + GRACE_S + 2, self.reports.release)]
        else:
            self._signal_launcher(number)
            self._steps = []
        last = now + (GRACE_S + 4 if self._steps else KILL_S)
        self._steps += [(last, lambda: self._signal_launcher(signal.SIGTERM)), (last + KILL_S, self._kill)]

    def _end_after_failure(self) -> None:
        now = time.monotonic()
        if any(report.unreachable for report in self.reports.ranks.values()):
            # The launcher may wait for a host that is gone until its own time limit, if it has one.
            now -= LINGER_S + KILL_S
        self._steps = [
            (now + LINGER_S, lambda: self.reports.send(stop=int(signal.SIGTERM), grace_s=KILL_S)),
            (now + LINGER_S + KILL_S, lambda: self._signal_launcher(signal.SIGTERM)),
            (now + LINGER_S + 2 * KILL_S, self._kill),
        ]

    def _act_on_time(self) -> None:
        if self.reports.hold_ended and not self.reports.running:
            self.reports.release()
        while self._steps and time.monotonic() >= self._steps[0][0]:
            self._steps.pop(0)[1]()
            if not self._steps:
                self._steps = [(time.monotonic() + KILL_S, self._kill)]

    def _sweep(self) -> None:
        """The launcher has ended: no rank may outlive it."""
        self.reports.release()
        deadline = time.monotonic() + 1.0
        while self.reports.running and time.monotonic() < deadline:  # last words on their way
            self.reports.wait(0.1)
        if self.reports.running:
            self.reports.send(stop=int(signal.SIGTERM), grace_s=KILL_S)
        deadline = time.monotonic() + KILL_S + 3
        while self.reports.running and time.monotonic() < deadline:
            self.reports.wait(0.2)
        self._signal_launcher(signal.SIGKILL)
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        for child in _children():
            if child.pid not in self._not_ours:
                for process in [*child.children(recursive=True), child]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    def _signal_launcher(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _kill(self) -> None:
        self.reports.send(stop=int(signal.SIGKILL), grace_s=0)
        self._signal_launcher(signal.SIGKILL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Collect signals while the job runs; each also wakes the reports' selector."""

        def note(number: int, _frame: FrameType | None) -> None:
            if number != signal.SIGCHLD:
                self._pending.append(number)

        read, write = os.pipe()
        os.set_blocking(write, False)
        before = {number: signal.signal(number, note) for number in (*_STOPPING, *_PASSED_ON, signal.SIGCHLD)}
        fd_before = signal.set_wakeup_fd(write)
        self.reports.selector.register(read, selectors.EVENT_READ, data=lambda: os.read(read, 512))
        try:
            yield
        finally:
            self.reports.selector.unregister(read)
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)


def run_job(
    argv: Sequence[str], environ: Mapping[str, str], rank_hosts: Sequence[str], remote_hosts: Sequence[str] = ()
) -> int:
    """Run the launcher to its end and show the first failing rank last.

    Args:
        argv: the launcher's command line.
        environ: its environment; ``HVDKIT_CHANNEL`` is added.
        rank_hosts: the host of each rank, by the names of the host list.
        remote_hosts: hosts other than this one, which must find the way back here.

    Returns:
        The first failing rank's exit code (128 + n where signal n ended it), 128 + n where signal n ended the job, else
        the launcher's exit code.

    Raises:
        LaunchError: the launcher cannot be started.
    """
    with Reports(tuple(remote_hosts)) as reports:
        job = Job(argv, environ, reports)
        code = job.run()
        sys.stdout.flush()
        if job.stopped_by is not None:
            name = signal.Signals(job.stopped_by).name
            _say(f"hvdkit: stopped by {name}; every rank that reported has ended")
            return 128 + job.stopped_by
        failure = reports.first_failure()
        if failure is not None:
            _say(describe_failure(failure, rank_hosts, reports))
            return failure_code(failure, code)
        if code != 0:
            started = (
                f"{len(reports.ranks)} of {len(rank_hosts)} ranks had started"
                if reports.ranks
                else "before any rank had started"
            )
            _say(f"hvdkit: {argv[0]} ended with exit code {code}, {started}; no rank reported a failure of its own")
        return code


def failure_code(failure: RankReport, launcher_code: int) -> int:
    """The exit code that a failure gives the whole job; never 0."""
    if failure.code and not failure.told_to_stop:
        return failure.code
    if failure.lost:
        return 1 if failure.unreachable else _EXIT_KILLED
    return launcher_code or failure.code or 1


def describe_failure(failure: RankReport, rank_hosts: Sequence[str], reports: Reports) -> str:
    """The last words on the screen: rank, host, exit code, and the last lines of that rank."""
    host = rank_hosts[failure.rank] if failure.rank < len(rank_hosts) else failure.host
    if failure.unreachable:
        how = "was lost: its host cannot be reached any more"
    elif failure.code is None:
        how = "was lost: the process that watched it was killed"
    elif failure.code > 128 and failure.code - 128 in {int(s) for s in signal.Signals}:
        how = f"was ended by {signal.Signals(failure.code - 128).name} (exit code {failure.code})"
    else:
        how = f"ended with exit code {failure.code}"
    others = sum(report.failed for report in reports.ranks.values()) - 1
    followed = f"; {others} other{'s' * (others != 1)} followed" if others else ""
    lines = failure.tail.rstrip("\n").split("\n")
    tail = "\n".join(f"  | {line.rstrip()}" for line in lines) if failure.tail.strip() else "  | (it wrote nothing)"
    return f"\nhvdkit: rank {failure.rank} on {host} {how}; it was the first to fail{followed}. Its last lines:\n{tail}"


def _children() -> list[psutil.Process]:
    try:
        return psutil.Process().children()
    except psutil.Error:
        return []


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _stdin_is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _new_group_that_dies_with_us() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(143)

    return prepare

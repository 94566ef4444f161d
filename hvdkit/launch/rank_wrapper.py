"""Runs one rank's command and tells the launcher how it ended. Started as a file on every rank; standard library only.

    python -I -S rank_wrapper.py [--tag 1] [--log-dir DIR] [--gpus 0-1:0,2;2-2:5] -- COMMAND...

The command's output is passed on line by line, so that ranks do not mix within a line, its last lines are kept, and
its exit code and signal become this process's own. ``HVDKIT_CHANNEL`` (addresses, port and a token) leads to the
launcher: the connection stays open, so each side notices when the other is gone, and then ends the command.
Without it, or where it cannot be reached, the rank runs all the same.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import selectors
import signal
import sys
import time

# Every rank waits for this file: its neighbours are imported from its folder, and not the package around them.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
TYPE_CHECKING = False

if TYPE_CHECKING:
    from hvdkit.launch.rank_channel import Channel
    from hvdkit.launch.rank_streams import Stream, write_all
else:
    from rank_channel import Channel
    from rank_streams import Stream, write_all

TAIL_BYTES = 16_000
FLUSH_S = 0.2  # an unfinished line (a prompt, a progress bar) waits this long for its end
GRACE_S = 5.0
HURRY_S = 0.7
ACKNOWLEDGE_S = 20.0  # how long the launcher may hold back a rank that has ended, while others still save their work
DRAIN_S = 1.0  # after the command ended, a process that it left behind may hold the pipes open this long
PR_SET_PDEATHSIG = 1
RANK_NAMES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGQUIT,
    signal.SIGCONT,
)
STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


class Rank:
    """The command of one rank while it runs."""

    def __init__(self, command: list[str], rank: int, tag: bool, log_dir: str | None, channel: Channel) -> None:
        self.channel, self.rank, self.told_to_stop = channel, rank, False
        self.kill_at: float | None = None
        self.tail: list[bytes] = []
        self.selector = selectors.DefaultSelector()
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        self.pending: list[int] = []
        signal.set_wakeup_fd(wake_write)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, self.on_signal)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self.pid = start(command, out_write, err_write)
        os.close(out_write)
        os.close(err_write)
        log = open_log(log_dir, rank)
        label = b"[%d] " % rank if tag else b""
        self.streams = {
            out_read: Stream(out_read, 1, label, log, self.tail),
            err_read: Stream(err_read, 2, label, log, self.tail),
        }
        for fd in (*self.streams, self.wake_read):
            self.selector.register(fd, selectors.EVENT_READ)
        if channel.socket is not None:
            self.selector.register(channel.socket, selectors.EVENT_READ)

    def on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self.pending.append(number)

    def run(self) -> int:
        """Serve until the command has ended and its output is passed on; returns its wait status."""
        status: int | None = None
        drain_until = 0.0
        while status is None or (self.streams and time.monotonic() < drain_until):
            for key, _ in self.selector.select(self.patience()):
                self.serve(key.fd)
            self.pass_on_signals()
            self.keep_time()
            if status is None:
                pid, code = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    status, drain_until = code, time.monotonic() + DRAIN_S
        for stream in self.streams.values():
            stream.flush()
        kill_group(self.pid, signal.SIGKILL)  # what the command left behind
        return status

    def patience(self) -> float:
        if any(stream.partial for stream in self.streams.values()):
            return FLUSH_S
        return 1.0 if self.kill_at is None else 0.1

    def serve(self, fd: int) -> None:
        if fd == self.wake_read:
            os.read(fd, 512)
        elif fd in self.streams:
            stream = self.streams[fd]
            before = stream.tracebacks
            if not stream.read():
                self.selector.unregister(fd)
                os.close(fd)
                del self.streams[fd]
            if stream.tracebacks > before:
                self.channel.send(event="traceback")
        elif self.channel.socket is not None:
            self.listen()

    def listen(self) -> None:
        assert self.channel.socket is not None
        connection = self.channel.socket
        messages = self.channel.receive()
        if messages is None:
            self.selector.unregister(connection)
            self.stop(signal.SIGTERM, GRACE_S)  # the launcher is gone, and with it the job
            return
        for message in messages:
            if "stop" in message:
                self.stop(int(str(message["stop"])), float(str(message.get("grace_s", GRACE_S))))
            elif "signal" in message:
                kill_group(self.pid, int(str(message["signal"])))

    def pass_on_signals(self) -> None:
        while self.pending:
            number = self.pending.pop(0)
            if number in STOPPING:
                # mpirun kills a second after its TERM: be faster, or the command's children outlive this process.
                self.stop(number, HURRY_S if number == signal.SIGTERM else GRACE_S)
            else:
                kill_group(self.pid, number)

    def stop(self, number: int, grace_s: float) -> None:
        self.told_to_stop = True
        kill_group(self.pid, number)
        kill_group(self.pid, signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)

    def keep_time(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            kill_group(self.pid, signal.SIGKILL)
            self.kill_at = now + 1.0
        for stream in self.streams.values():
            if stream.partial and now - stream.partial_since >= FLUSH_S:
                stream.flush()


def start(command: list[str], out: int, err: int) -> int:
    """Fork and exec in a process group of its own, so that a signal reaches it once: through this process."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)
    pid = os.fork()
    if pid:
        try:
            os.setpgid(pid, pid)
        except OSError:  # it has done so itself and is already running the command, or has ended
            return pid
        return pid
    try:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(143)
        signal.set_wakeup_fd(-1)
        for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"hvdkit: cannot start {command[0]!r}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)
    finally:
        os._exit(125)


def kill_group(pid: int, number: int) -> None:
    """Signal the command's whole process group; nothing happens where it has ended."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def open_log(log_dir: str | None, rank: int) -> int | None:
    """The rank's own log file, made anew; a directory that cannot be written is said and costs no training."""
    if log_dir is None:
        return None
    try:
        os.makedirs(log_dir, exist_ok=True)  # noqa: PTH103 - pathlib is slow to import
        return os.open(f"{log_dir}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        write_all(2, f"hvdkit: no log for rank {rank}: {log_dir}: {error.strerror}\n".encode(errors="replace"))
        return None


def own_rank(environ: dict[str, str]) -> int:
    """This process's rank as its launcher numbers it, 0 where none does."""
    for name in RANK_NAMES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def gpu_mask(spec: str, rank: int) -> str | None:
    """The GPU numbers of the host that runs ``rank``, from ``first-last:0,2;first-last:1``; None if it has no list."""
    for part in filter(None, spec.split(";")):
        ranks, _, gpus = part.partition(":")
        first, _, last = ranks.partition("-")
        if int(first) <= rank <= int(last):
            return gpus
    return None


def end(status: int) -> None:
    """Exit as the command did: with its code, or by its signal and without a second core file."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.set_wakeup_fd(-1)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def report(rank: Rank, status: int) -> None:
    """Tell the launcher how the command ended and wait for its word, so that nothing is lost on the way."""
    channel = rank.channel
    if channel.socket is None:
        return
    signaled = os.WIFSIGNALED(status)
    tail = b"".join(rank.tail)[-TAIL_BYTES:].decode("utf-8", "replace")
    code = 128 + os.WTERMSIG(status) if signaled else os.WEXITSTATUS(status)
    channel.send(event="exit", code=code, signaled=signaled, told_to_stop=rank.told_to_stop, tail=tail)
    if channel.socket is not None:
        channel.socket.settimeout(ACKNOWLEDGE_S)
        while channel.socket is not None and channel.receive() is not None:
            continue


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    values = dict(zip(options[::2], options[1::2], strict=True))
    if "--json" in values:
        command = json.loads(values["--json"])
    number = own_rank(dict(os.environ))
    channel = Channel(os.environ.pop("HVDKIT_CHANNEL", ""), number)
    mask = gpu_mask(values.get("--gpus", ""), number)
    if mask is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mask
    os.environ.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # the output is a pipe, and the last words of a rank must not be lost in it
    rank = Rank(command, number, values.get("--tag") == "1", values.get("--log-dir"), channel)
    status = rank.run()
    report(rank, status)
    end(status)


if __name__ == "__main__":
    main(sys.argv[1:])

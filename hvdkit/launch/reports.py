"""What ranks tell the launcher while they run: who has started, whose output shows a traceback, who ended and how."""

from __future__ import annotations

import errno
import json
import secrets
import selectors
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdkit.launch.rank_channel import CHUNK, keep_alive

_MAX_MESSAGE = 1 << 20
_ROUTES_ASKED = 32
# A rank that ends with one of these was told so by another that went before it.
_SYMPTOMS = (
    "HorovodInternalError",
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "has been aborted",
)
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_KILLED = (128 + 15, 128 + 9)


@dataclass
class RankReport:
    """What is known of one rank. ``code`` is its exit code, 128 + signal number where a signal ended it."""

    rank: int
    host: str
    traceback_at: int | None = None
    ended_at: int | None = None
    code: int | None = None
    lost: bool = False
    unreachable: bool = False  # lost because nothing came through any more, not because the other side closed
    told_to_stop: bool = False
    tail: str = ""

    @property
    def failed(self) -> bool:
        return self.lost or (self.code is not None and self.code != 0)

    @property
    def order(self) -> int:
        """When its trouble began: with its last traceback, else with its end (a count of messages, not a time)."""
        return min(at for at in (self.traceback_at, self.ended_at, 1 << 62) if at is not None)


@dataclass
class _Connection:
    socket: socket.socket
    report: RankReport | None = None
    received: bytes = b""
    held: bool = False


@dataclass
class Reports:
    """A small server for the ranks' connections. Use as a context manager; poll it with :meth:`wait`."""

    hosts: tuple[str, ...] = ()  # other hosts that must find the way here; empty: this machine only
    ranks: dict[int, RankReport] = field(default_factory=dict)
    hold_ended: bool = False  # keep ranks that have ended waiting, so that the MPI does not kill those still saving

    def __post_init__(self) -> None:
        _allow_many_files()
        self.token = secrets.token_hex(16)
        self.selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._count = 0
        self.server = _listen(everywhere=bool(self.hosts))
        self.selector.register(self.server, selectors.EVENT_READ)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self.server.close()
        self.selector.close()

    @property
    def address(self) -> str:
        """What goes into ``HVDKIT_CHANNEL``: addresses, port, token."""
        addresses = routes_back(self.hosts) if self.hosts else ["127.0.0.1"]
        return f"{','.join(addresses)}:{self.server.getsockname()[1]}:{self.token}"

    @property
    def running(self) -> int:
        """Ranks that are connected and have not ended."""
        return sum(c.report is not None and c.report.ended_at is None for c in self._connections.values())

    def wait(self, timeout_s: float) -> None:
        """Handle what arrives within ``timeout_s``; returns early after the first batch."""
        for key, _ in self.selector.select(timeout_s):
            if key.fileobj is self.server:
                self._accept()
            elif key.data is not None:
                key.data()
            elif key.fd in self._connections:
                self._read(self._connections[key.fd])

    def send(self, **message: Any) -> None:
        """Tell every rank that still runs."""
        data = json.dumps(message).encode() + b"\n"
        for connection in list(self._connections.values()):
            if connection.report is not None and connection.report.ended_at is None:
                try:
                    connection.socket.sendall(data)
                except OSError:
                    self._drop(connection)

    def release(self) -> None:
        """Let ranks go that have ended and were held back."""
        self.hold_ended = False
        for connection in [c for c in self._connections.values() if c.held]:
            self._drop(connection)

    def first_failure(self) -> RankReport | None:
        """The rank whose failure the others followed: the first one that is not a consequence of another's."""
        failed = sorted((report for report in self.ranks.values() if report.failed), key=lambda report: report.order)
        kinds: list[int] = []
        for report in failed:
            kinds.append(_consequence(report, after_failure=0 in kinds))
        return failed[kinds.index(min(kinds))] if failed else None

    def _accept(self) -> None:
        try:
            accepted, _ = self.server.accept()
        except OSError:
            return
        keep_alive(accepted)
        accepted.settimeout(2.0)
        self._connections[accepted.fileno()] = _Connection(accepted)
        self.selector.register(accepted, selectors.EVENT_READ)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(CHUNK)
        except OSError as error:
            data = b""
            if connection.report is not None and error.errno in _UNREACHABLE:
                connection.report.unreachable = True
        if not data or len(connection.received) > _MAX_MESSAGE:
            self._drop(connection)
            return
        *lines, connection.received = (connection.received + data).split(b"\n")
        for line in lines:
            if not self._handle(connection, line):
                self._drop(connection)
                return

    def _handle(self, connection: _Connection, line: bytes) -> bool:
        """Take in one message; False ends the connection: a stranger's, or one that has said its last word."""
        try:
            message = json.loads(line)
            event = message["event"]
            if connection.report is None:
                if event != "start" or not secrets.compare_digest(str(message["token"]), self.token):
                    return False
                connection.report = RankReport(int(message["rank"]), str(message["host"]))
                self.ranks[connection.report.rank] = connection.report
                return True
        except (ValueError, KeyError, TypeError):
            return False
        self._count += 1
        report = connection.report
        if event == "traceback":
            report.traceback_at = self._count
        if event != "exit":
            return True
        report.ended_at, report.code, report.tail = self._count, int(message["code"]), str(message["tail"])
        report.told_to_stop = bool(message["told_to_stop"])
        connection.held = self.hold_ended
        return connection.held

    def _drop(self, connection: _Connection) -> None:
        report = connection.report
        if report is not None and report.ended_at is None:
            self._count += 1
            report.ended_at, report.lost = self._count, True
        self._connections.pop(connection.socket.fileno(), None)
        self.selector.unregister(connection.socket)
        connection.socket.close()


def _consequence(report: RankReport, after_failure: bool) -> int:
    """0: failed by itself; 1: its words tell of another's failure; 2: it was ended."""
    if report.told_to_stop or (after_failure and (report.lost or report.code in _KILLED)):
        return 2
    return int(any(symptom in report.tail for symptom in _SYMPTOMS))


def _allow_many_files() -> None:
    """A connection per rank: the usual soft limit of 1024 open files is too low for a large job."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(everywhere: bool) -> socket.socket:
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=512)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=512)


def routes_back(hosts: Iterable[str]) -> list[str]:
    """This machine's addresses as the given hosts see it: those that the kernel would send from. No packet is sent."""
    found: dict[str, None] = {}
    for host in list(hosts)[:_ROUTES_ASKED]:
        try:
            candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            continue
        for family, kind, protocol, _, address in candidates:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)
                except OSError:
                    continue
                found[str(probe.getsockname()[0])] = None
    return [f"[{address}]" if ":" in address else address for address in found] or [socket.gethostname()]

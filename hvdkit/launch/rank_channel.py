"""The connection between a rank's wrapper and the launcher: JSON lines over TCP. Standard library only."""

from __future__ import annotations

import json
import os
import socket

CHUNK = 1 << 16
CONNECT_S = 3.0
SEND_S = 2.0


class Channel:
    """The connection to the launcher; a channel that could not be opened, or broke, swallows what is sent."""

    def __init__(self, address: str, rank: int) -> None:
        self.socket: socket.socket | None = None
        self.received = b""
        if not address:
            return
        hosts, port, token = address.rsplit(":", 2)
        for host in hosts.split(","):
            try:
                self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
                break
            except OSError:
                continue
        if self.socket is not None:
            keep_alive(self.socket)
            self.socket.settimeout(SEND_S)
            self.send(event="start", token=token, rank=rank, host=socket.gethostname(), pid=os.getpid())

    def send(self, **message: object) -> None:
        if self.socket is not None:
            try:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.close()

    def receive(self) -> list[dict[str, object]] | None:
        """Messages that arrived; None when the launcher is gone."""
        assert self.socket is not None
        try:
            data = self.socket.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self.close()
            return None
        *lines, self.received = (self.received + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def keep_alive(connection: socket.socket) -> None:
    """Notice within some 9 seconds that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 9_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

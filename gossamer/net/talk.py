"""A connection between two ranks of one worker: JSON objects, a line each."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
_MOST_GREETING_BYTES = 1 << 16


class Line:
    """One connection. `heard` and `lost` are called in its thread."""

    def __init__(self, sock: socket.socket, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self._sock, self._heard, self._lost = sock, heard, lost
        self._lock = threading.Lock()
        self.finished = False
        """That it ends is no news."""

    def start(self) -> None:
        """Listens from now on."""
        threading.Thread(target=self._listen, daemon=True, name="crew").start()

    def say(self, message: Message) -> None:
        """Sends a message. Where the connection is broken, its reader has noticed, or will."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._sock.sendall(data)

    def _listen(self) -> None:
        try:
            with suppress(OSError, ValueError), self._sock.makefile("rb") as lines:
                for line in lines:
                    self._heard(json.loads(line))
        finally:
            if not self.finished:
                self._lost()

    def close(self) -> None:
        """Ends it."""
        self.finished = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def listening(local: bool) -> socket.socket:
    """At a port that is free; `local`: of loopback."""
    if local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def first_line(sock: socket.socket) -> bytes:
    """Of a greeting, and not a byte more."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = sock.recv(1)
        if not piece or len(data) > _MOST_GREETING_BYTES:
            raise ValueError("no greeting")
        data += piece
    return bytes(data)

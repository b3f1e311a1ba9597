"""A connection between two ranks of one worker: JSON objects, a line each; and which of the ranks this process is."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from gossamer.core.errors import BadInput

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


def world_of(size: int, site: str) -> tuple[int, bool]:
    """(rank, whether all are started) of this process, where torchrun or the first rank has started it; (0, False): neither.

    Raises:
        BadInput: as many processes were started as the worker has not.
    """
    env = os.environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return 0, False
    try:
        rank, n = int(env["RANK"]), int(env["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise BadInput(f"RANK and WORLD_SIZE must both be set, to numbers ({error}): start with torchrun, or set neither") from error
    if n != size:
        raise BadInput(
            f"{n} processes were started for site {site} (WORLD_SIZE), whose worker has {size} ranks in the fleet: start {size}, or one "
            "without RANK and WORLD_SIZE, which starts the others itself"
        )
    return rank, True

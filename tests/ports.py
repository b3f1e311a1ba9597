"""Ports that stay free until somebody comes back to them."""

from __future__ import annotations

import random
import socket


def free() -> int:
    """A port of this machine that is free, and not one of those that the system hands out to whoever asks for any: while its process is
    away, nobody else is given it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue

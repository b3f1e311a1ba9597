"""Two connections that are made one: whatever ends it, both are closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from gossamer.wan.relay.messages import splice


def test_both_are_closed_though_it_is_cancelled_again_while_it_ends() -> None:
    async def run() -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        ends = [await asyncio.open_connection(sock=near) for near, _ in pairs]
        task = asyncio.ensure_future(splice(ends[0], ends[1]))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0)  # it waits for its two directions now
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert all(writer.transport.is_closing() for _, writer in ends)
        for _, far in pairs:
            far.close()

    asyncio.run(run())

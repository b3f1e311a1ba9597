"""`gossamer watch`: a run folder in a terminal, and as a page, while the run goes on. It only ever reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live as Screen

from gossamer.core.errors import BadInput
from gossamer.report.live import load, loads, version
from gossamer.report.serve import Live, Server
from gossamer.report.standing import Watcher
from gossamer.report.terminal import View

EVERY_S = 1.0
PATIENCE_S = 120.0
"""So long a run may load before it makes its folder."""


def watch(
    folder: Path, console: Console, *, port: int | None = None, once: bool = False, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Shows the run until it has finished, or until Ctrl-C; with a page, until Ctrl-C. `once`: as it stands, and no page. A run that is
    still loading is waited for.

    Raises:
        BadInput: it is no run folder, and becomes none; the port cannot be had; a page is asked for once.
    """
    if once and port is not None:
        raise BadInput(f"--once --port {port}: a page is there as long as it is watched; leave one of the two out")
    if not once and not _there(folder, console, sleep):
        return
    run, mark, watcher = load(folder, spans=False), version(folder), Watcher()
    if once:
        console.print(View(watcher.look(run)))
        return
    server = Server(Live(folder), port) if port is not None else None
    note = hint = f"page: {server.url} (Ctrl-C ends)" if server else "Ctrl-C ends; --port 8787 shows a page, too"
    try:
        with Screen(View(watcher.look(run), note), console=console, auto_refresh=False, transient=False) as screen:
            while server or not run.finished:
                sleep(EVERY_S)
                if (now := version(folder)) != mark:
                    try:
                        run, mark, note = load(folder, spans=False), now, hint
                    except (BadInput, OSError) as error:  # caught while it was being written
                        note = f"not read just now: {error}"
                screen.update(View(watcher.look(run), note), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        if server:
            server.close()


def _there(folder: Path, console: Console, sleep: Callable[[float], None]) -> bool:
    """Whether to look at the folder: when there is something, or nothing comes. False: Ctrl-C."""
    waited_s = 0.0
    try:
        while loads(folder) and waited_s < PATIENCE_S:
            if not waited_s:
                text = f"no run in {folder} yet: one that was just started is still loading, and is waited for (Ctrl-C ends)"
                console.print(text, markup=False)
            sleep(EVERY_S)
            waited_s += EVERY_S
    except KeyboardInterrupt:
        return False
    return True

"""Commands for looking at runs: report, watch, trace. As in `gossamer.cli`, there is no logic here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path | None,
    typer.Option("--out", help="The page to write; left out: report.html in the run folder. Needed for several runs.", show_default=False),
]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.", show_default=False)],
    out: Out = None,
) -> None:
    """Make one self-contained page of one or several runs."""
    from gossamer.app import commands

    commands.report(runs, out=out)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that goes on, or has finished.", show_default=False)],
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Show it as a page, too, at 127.0.0.1. 0: a free port.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="As it stands now, and no more.")] = False,
) -> None:
    """Watch a run while it goes on: in this terminal, and as a page in the browser."""
    from gossamer.app import commands

    commands.watch(run, port=port, once=once)


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file to write, such as trace.json.", show_default=False)],
) -> None:
    """Export the timeline of a run for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from gossamer.app import commands

    commands.trace(run, to=to)


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (report, watch, trace):
        app.command()(command)

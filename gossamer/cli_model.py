"""Commands for what a run has come to: export. As in `gossamer.cli`, there is no logic here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Round = Annotated[
    int | None,
    typer.Option("--round", min=0, metavar="N", help="Of the checkpoint of this round. Left out: the end of the run.", show_default=False),
]


def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to make.", show_default=False)],
    round: Round = None,
) -> None:
    """Write the model of a run as a folder that transformers loads: safetensors, configuration, tokenizer and model card."""
    from gossamer.app import commands

    commands.export(run, to=to, round=round)


def add_to(app: typer.Typer) -> None:
    """Adds them to `gossamer`."""
    app.command("export")(export)

"""Commands for what a run has come to: export and eval. As in `gossamer.cli`, there is no logic here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Round = Annotated[
    int | None,
    typer.Option("--round", min=0, metavar="N", help="Of the checkpoint of this round. Left out: the end of the run.", show_default=False),
]
BackTo = Annotated[
    int | None,
    typer.Option(
        "--round",
        min=1,
        metavar="N",
        help="With --resume: go back to the checkpoint of this round; what came after it is put aside.",
        show_default=False,
    ),
]


def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to make.", show_default=False)],
    round: Round = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, for the checkpoint that the run went on from.")] = False,
) -> None:
    """Write the model of a run as a folder that transformers loads: safetensors, configuration, tokenizer and model card."""
    from gossamer.app import commands

    commands.export(run, to=to, round=round, adapter=adapter)


def evaluate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run folder, or a model folder as export and Hugging Face write them.", show_default=False
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="A,B,...", help="Which. Left out: the embedded suite, and all that --data has.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Items on disk: arc_easy.jsonl and so on. None: from the hub.", show_default=False),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="SOURCE",
            help="Text of the embedded suite: stdlib, a folder or a file, as data.source. None: what the run held out.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            "--column", metavar="NAME", help="Of --text: the column or field that holds the text. None: text.", show_default=False
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=2, metavar="N", help="Items of a task at most.", show_default=False)] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the items that are made.")] = 0,
    round: Round = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            min=1,
            metavar="L",
            help="Tokens that the model sees at once. None: what a run was trained with, what a model declares.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Texts at a time.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The record to write. Left out: eval.json in the run folder.", show_default=False),
    ] = None,
) -> None:
    """Zero-shot accuracies with standard errors, through lm-eval: public tasks, and a suite made of what a run held out, or of a text."""
    from gossamer.app import commands

    commands.evaluate(
        folder, tasks=tasks, data=data, text=text, column=column, limit=limit, seed=seed, out=out, round=round, length=length, batch=batch
    )  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Adds them to `gossamer`."""
    app.command("export")(export)
    app.command("eval")(evaluate)

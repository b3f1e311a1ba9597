"""A run small enough for a test: a Llama of 30 thousand parameters on a text that the test makes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path

from gossamer.app.train import WORKER_MODULES
from gossamer.net.fork import Forked, nursery

TEXT = "the worker sends what it has learned to its peers and waits for theirs then takes one outer step together again"
WORDS = TEXT.split()


def corpus(folder: Path) -> Path:
    """Text files with some order in them."""
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(24):
        text = " ".join(WORDS[(k * j + j * j) % len(WORDS)] for j in range(400))
        (folder / f"part-{k}.txt").write_text(text + "\n")
    return folder


def settings(text: Path, **more: object) -> list[str]:
    """Values of `--set` for a small run on `text`; `more` has dots written as two underscores."""
    values: dict[str, object] = {
        "data.source": f'"{text}"',
        "data.tokenizer": '"bytes"',
        "model.config": '{model_type = "llama", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, '
        "num_attention_heads = 2, num_key_value_heads = 2, tie_word_embeddings = true}",
        "plan.steps": 2,
        "plan.batch": 2,
        "plan.sequence": 16,
        "eval.sequences": 4,
        "eval.batch": 4,
        "run.rounds": 4,
        "run.device": '"cpu"',
    }
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in values.items()]


def mixture(folder: Path) -> str:
    """A value of `data.mix`: two parquet files, and one of JSON lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "parquet").mkdir(parents=True)
    for k in range(2):
        texts = [" ".join(WORDS[(k + i * j + j * j) % len(WORDS)] for j in range(3 + i % 17)) for i in range(150)]
        pq.write_table(pa.table({"content": texts}), folder / "parquet" / f"part-{k}.parquet")
    lines = [json.dumps({"text": " ".join(WORDS[i % 7 :]), "n": i}) for i in range(150)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return f'[{{source = "{folder}/parquet", text = "content", weight = 2}}, {{source = "{folder}/lines.jsonl", weight = 1}}]'


def flags(sets: list[str]) -> list[str]:
    """As command line arguments."""
    return [a for s in sets for a in ("--set", s)]


def command(*arguments: str) -> tuple[int, str]:
    """The exit code of a command that runs in this process, and what it says on stderr. (What its workers say goes where theirs goes.)"""
    from gossamer import cli

    said = io.StringIO()
    with redirect_stderr(said):
        code = cli.main(arguments)
    return code, said.getvalue()


def forked(log: Path, arguments: list[str], cwd: Path, more: Mapping[str, str] | None = None) -> Forked:
    """`gossamer ARGUMENTS` in a process of its own, with its output added to `log`. `more`: of its environment."""
    argv, env = [sys.executable, "-m", "gossamer", *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    return nursery([*WORKER_MODULES, "gossamer.app.wan.run"], env).fork(argv, env | (more or {}), log, name="gossamer", cwd=cwd)

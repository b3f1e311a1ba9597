"""`gossamer eval`: which tasks, their items, the accuracies, and the record of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gossamer.app.early import check_model_folder, loading, unknown_text
from gossamer.app.folder import clean, write_atomically
from gossamer.app.progress import still
from gossamer.app.wording import nearest
from gossamer.app.zeroshot import embedded, harness, sources
from gossamer.app.zeroshot.harness import Score, against_chance
from gossamer.app.zeroshot.items import Item, digest
from gossamer.app.zeroshot.tasks import EMBEDDED, PUBLIC, TASKS
from gossamer.core.errors import BadInput
from gossamer.train.corpus import missing
from gossamer.train.documents import exists

if TYPE_CHECKING:
    from gossamer.app.zeroshot.subject import Subject

FILE = "eval.json"
"""Of a run folder."""
FORMAT = 1
NOT_KNOWN = "Whether the model has been trained on the text of {} is not known here."
"""Of a text that is named, rather than held out by the run."""
SUITE = "embedded"
"""Among the names of tasks: both of the embedded suite."""


@dataclass(frozen=True)
class Request:
    """What to ask a model.

    Args:
        tasks: names; none: the embedded suite, and every task of which `data` has a file.
        data: a folder of .jsonl files; None: items of public tasks come from the hub.
        text, column: of the embedded suite, as of `gossamer.app.zeroshot.subject.held_out`.
        limit: items of a task at most; None: all there are, and of the embedded suite `embedded.ITEMS`.
        seed: of the embedded suite.
    """

    tasks: tuple[str, ...] = ()
    data: Path | None = None
    text: str | None = None
    limit: int | None = None
    seed: int = 0
    batch: int = harness.BATCH
    column: str | None = None


def names_of(ask: Request) -> list[str]:
    """The tasks of a request, in order.

    Raises:
        BadInput: an unknown name, a task of which the folder has no file, text that no task asks about, or a column of none.
    """
    files = sources.found_in(ask.data) if ask.data else {}
    wanted = [name for given in ask.tasks for name in (EMBEDDED if given == SUITE else [given])] or [*EMBEDDED, *files]
    for name in wanted:
        if name not in TASKS:
            near = nearest(name, [*TASKS, SUITE])
            hint = f"; did you mean {near}?" if near else "."
            known = f"{SUITE} (which is {' and '.join(EMBEDDED)}), {', '.join(PUBLIC)}"
            raise BadInput(f"there is no task {name!r}{hint} Known: {known}")
        if ask.data and name not in EMBEDDED and name not in files:
            raise BadInput(
                f"--data {ask.data} has no {name}{sources.SUFFIX}; it has items of {', '.join(files)}: put the file there, or leave the "
                "task out"
            )
    if ask.text is not None and not EMBEDDED.keys() & set(wanted):
        raise BadInput(f"--text {ask.text}: it is for {' and '.join(EMBEDDED)}, and neither is asked: leave it out, or add one to --tasks")
    if ask.column is not None and ask.text is None:
        raise BadInput(f"--column {ask.column} is of the text that --text names, and none is named: give it too, or leave --column out")
    return list(dict.fromkeys(wanted))


def items_of(ask: Request, names: Sequence[str], about: Subject) -> dict[str, tuple[list[Item], str]]:
    """The items of each task, and where they come from."""
    from gossamer.app.zeroshot import subject

    files = sources.found_in(ask.data) if ask.data else {}
    documents: list[str] | None = None
    found = {}
    for name in names:
        if name in EMBEDDED:
            documents = list(subject.held_out(about, ask.text, ask.column)) if documents is None else documents
            made = embedded.make(name, documents, ask.seed, ask.limit or embedded.ITEMS)
            found[name] = made, f"{f'text of {ask.text}' if ask.text else subject.HELD_OUT}, seed {ask.seed}"
        elif name in files:
            found[name] = sources.read_file(TASKS[name], files[name], ask.limit), files[name].name
        else:
            found[name] = sources.from_hub(TASKS[name], ask.limit), "the hub"
    return found


def check(ask: Request) -> list[str]:
    """The tasks of a request, before a large model is read.

    Raises:
        BadInput: as `names_of`; or lm-eval is not installed.
    """
    harness.check_installed()
    return names_of(ask)


def evaluate(about: Subject, ask: Request, known: Path | None = None, now: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The record of an evaluation: `eval.json`.

    Args:
        known: an earlier record: the same items are not asked of the same model again.
        now: told what goes on.

    Raises:
        BadInput: as `check`; items cannot be had.
    """
    now("the items are made")
    items = items_of(ask, check(ask), about)
    record = {"format": FORMAT, **about.about, "longest": about.longest, "versions": _versions()}
    there = _earlier(known, record)
    tasks = {n: there[n] for n, (asked, _) in items.items() if n in there and there[n]["items_sha256"] == digest(asked)}
    todo = [(TASKS[n], asked) for n, (asked, _) in items.items() if n not in tasks]
    scores = harness.score(about.model, about.tokenizer, todo, longest=about.longest, batch=ask.batch, now=now) if todo else []
    tasks |= {score.task: _record(score, items[score.task][1]) for score in scores}
    return record | {"tasks": {name: tasks[name] for name in items}}


def _record(score: Score, source: str) -> dict[str, Any]:
    return {
        "accuracy": score.accuracy,
        "standard_error": score.standard_error,
        "chance": score.chance,
        "verdict": score.verdict,
        "items": score.items,
        "metric": score.metric,
        "accuracies": dict(score.accuracies),
        "source": source,
        "items_sha256": score.items_sha256,
        "correct": score.correct,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import gossamer

    return {"gossamer": gossamer.__version__} | {name: version(name) for name in ("lm_eval", "torch", "transformers")}


def mean_of(record: dict[str, Any]) -> tuple[float, float, float]:
    """Mean accuracy over the tasks, each weighing the same; its standard error, sqrt(sum of squares) / tasks; and the mean of chance."""
    tasks = list(record["tasks"].values())
    mean, chance = (sum(t[key] for t in tasks) / len(tasks) for key in ("accuracy", "chance"))
    return mean, math.sqrt(sum(t["standard_error"] ** 2 for t in tasks)) / len(tasks), chance


def kept(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Writes the record, whole or not at all. Other tasks in the file that were asked of the same model stay.

    Raises:
        RunFailed: the file cannot be written.
    """
    whole = record | {"tasks": _earlier(path, record) | record["tasks"]}
    write_atomically(path, json.dumps(clean(whole), indent=1) + "\n")
    return record


def _earlier(path: Path | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks in a file that were asked of the same model in the same way; none where there is none, or it is not one of ours."""
    if path is None:
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before[key] == record[key] for key in ("format", "model_sha256", "longest", "versions"))
        return {name: t for name, t in before["tasks"].items() if name in TASKS and t["items_sha256"]} if same else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def run(folder: Path, ask: Request, out: Path | None, console: Console, *, round: int | None = None, length: int | None = None) -> None:
    """Evaluates, prints the table, and writes the record: to `out`, else into the folder of a run.

    Raises:
        BadInput, RunFailed: as `evaluate` and `gossamer.app.zeroshot.subject.load`.
    """
    made = any(name in EMBEDDED for name in check(ask))
    if out is not None and not out.parent.is_dir():
        raise BadInput(f"--out {out}: there is no folder {out.parent}; make it, or choose another")
    check_model_folder(folder, round)
    if made and ask.text is None and not (folder / "config.toml").is_file():
        raise unknown_text(folder)
    if ask.text is not None and not exists(ask.text):
        raise missing(ask.text, "--text")
    with loading(lambda: "nothing was written"), still("loading") as now:
        from gossamer.app.zeroshot import subject

        about = subject.load(folder, round, length)
        record = evaluate(about, ask, now=now)
    path = out or (folder / FILE if about.run else None)
    if path:
        kept(path, record)
    console.print(table(record))
    console.print("± one standard error, over the items. At chance: within two of them of a guess.")
    if ask.text:
        console.print(NOT_KNOWN.format(ask.text), markup=False)
    if path:
        console.print(f"written: {path}", markup=False)


def table(record: dict[str, Any]) -> Table:
    """For a terminal."""
    made = Table(box=None)
    for heading in ("task", "items", "accuracy, %", "chance, %", "", "metric", "items from"):
        made.add_column(heading, justify="right" if heading in ("items", "accuracy, %", "chance, %") else "left")
    for name, t in record["tasks"].items():
        accuracy = percent(t["accuracy"], t["standard_error"])
        made.add_row(TASKS[name].title, f"{t['items']:,}", accuracy, f"{100 * t['chance']:.1f}", t["verdict"], t["metric"], t["source"])
    if len(record["tasks"]) > 1:
        mean, error, chance = mean_of(record)
        made.add_row("mean", "", percent(mean, error), f"{100 * chance:.1f}", against_chance(mean, error, chance), "", "")
    return made


def percent(value: float, error: float) -> str:
    """A share and its standard error, in per cent.

    >>> percent(0.5, 0.013)
    '50.0 ± 1.3'
    """
    return f"{100 * value:.1f} ± {100 * error:.1f}"

"""Results as cells: one small JSON file for each configuration that has been run, named by a hash of it. A cell is run once, whoever asks
for it, and kept.

    cells = run_cells([config_a, config_b], cells=Path("bench/results/cells"), work=Path("runs/work"), processes=2)
    losses = [cell.number("final_loss") for cell in cells]
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.app import corpora
from gossamer.app.config import LOCAL, Config, plain
from gossamer.app.engines import Engine, outcomes_on
from gossamer.app.folder import RunFolder, clean, write_atomically
from gossamer.app.job import Job, resolve
from gossamer.app.models import source_of
from gossamer.app.options import check_options, find_recipe
from gossamer.app.pool import Attempt, Outcome, outcomes
from gossamer.app.progress import count, duration
from gossamer.core.errors import BadInput, Stopped
from gossamer.train import tokenizer
from gossamer.train.pretrained import WEIGHTS, folder_of

CELLS_VERSION = 1
"""Of what a configuration means: raise it when a default, a recipe, a fleet model or the training changes so that equal configurations give
other results. Every cell is then run anew."""

_NEEDED = frozenset({"method", "tokens", "final_loss", "wall_s", "target_perplexity", "charged_as"})
"""Of a summary: what tables look up."""


@dataclass(frozen=True)
class Cell:
    """What is kept of one run. `summary` and `curve` are None where it is missing (of another shard) or has failed."""

    config: Config
    hash: str
    summary: dict[str, Any] | None = None
    """The run's summary.json, under the name that `config` gives it."""
    curve: list[tuple[float, float, float]] | None = None
    """One (tokens, time_s, loss) per evaluation of the fleet; the loss is NaN where it was not finite."""
    seconds: float | None = None
    """Real time that the run took, in one process (of a run that was interrupted: since it went on)."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of gossamer, torch and python."""
    failed: str | None = None
    """Why there is no summary, where the run could not come to its end."""

    def number(self, key: str) -> float | None:
        """A number of the summary, the mean over the workers where there is one for each; None where there is none."""
        value = (self.summary or {}).get(key)
        value = value.get("mean") if isinstance(value, Mapping) else value
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def run_cells(
    configs: Sequence[Config],
    *,
    cells: Path,
    work: Path,
    processes: int = 1,
    console: Console | None = None,
    shard: tuple[int, int] = (0, 1),
    keep: bool = False,
    engine: Engine | None = None,
) -> list[Cell]:
    """The cells of `configs`, in their order. What is not there yet is simulated first; equal configurations are run once.

    Several processes may fill one folder at the same time: each cell is run by one of them. An interrupted cell goes on from the last
    checkpoint in its run folder, if it has one.

    Args:
        cells: the folder of the cells, `<hash>.json` each; made when it is missing.
        work: for the run folders, `<hash>` each. They are deleted once their cell is stored.
        processes: runs at a time, each in a process of its own; 1: in this one, one after another.
        console: where the budget and the progress are told; None: nowhere.
        shard: (k, n) with 0 <= k < n: runs only every n-th of the missing cells, so that n machines can share the work.
        keep: keep the run folders, traces and all.
        engine: runs them instead, on other machines; `cells` and `work` are on storage that those share.

    Raises:
        BadInput: a configuration that cannot work, a damaged cell.
        Stopped: Ctrl-C; finished cells are kept.
    """
    if not 0 <= shard[0] < shard[1]:
        raise BadInput(f"shard is {shard}: expected (k, n) with 0 <= k < n")
    jobs = [resolve(config) for config in configs]
    texts: dict[str, str] = {}
    marks = [cell_hash(job, texts) for job in jobs]
    by_mark: dict[str, Job] = {}
    for mark, job in zip(marks, jobs, strict=True):
        by_mark.setdefault(mark, job)
    mine = set(sorted(by_mark)[shard[0] :: shard[1]])
    there = {mark: cell for mark, job in by_mark.items() if (cell := read_cell(cells, mark, job.config)) is not None}
    todo = {mark: job for mark, job in by_mark.items() if mark in mine and mark not in there}
    if console:
        console.print(budget(by_mark, there, todo, cells, processes) + (f", on {engine.name}" if engine else ""), markup=False)
    unkept: dict[str, str] = {}
    if todo:
        _prepare(list(todo.values()), cells, work)
        unkept = _run(todo, cells, work, processes, console, keep, engine)
    elif engine:
        engine.close()
    found = {mark: read_cell(cells, mark, job.config) for mark, job in by_mark.items()}
    return [
        _named(found[mark] or Cell(job.config, mark, failed=unkept.get(mark)), job.config) for mark, job in zip(marks, jobs, strict=True)
    ]


def _prepare(jobs: Sequence[Job], cells: Path, work: Path) -> None:
    """Folders, and the tokens, made once before all processes ask for them."""
    for folder in (cells, work):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the folder {folder} cannot be made ({error.strerror}): choose another, where you may write") from error
    for job in {(job.config.data, job.config.plan.sequence): job for job in jobs}.values():
        job.corpus()


def _run(
    todo: Mapping[str, Job], cells: Path, work: Path, processes: int, console: Console | None, keep: bool, engine: Engine | None
) -> dict[str, str]:
    """Runs `todo`. Returns what went wrong where no cell says it."""
    begun_s, done, tokens = time.monotonic(), 0, 0
    total = sum(map(_tokens, todo.values()))
    unkept: dict[str, str] = {}
    watch = console is not None and console.is_terminal and processes == 1 and engine is None
    attempts = [Attempt(mark, job.config, cells, work, keep) for mark, job in todo.items()]
    try:
        with closing(outcomes_on(engine, attempts) if engine else outcomes(attempts, processes, quiet=not watch)) as ended:
            for attempt, outcome in ended:
                job = todo[attempt.mark]
                done, tokens = done + 1, tokens + _tokens(job)
                if outcome.kind == "error":
                    unkept[attempt.mark] = outcome.message
                if console:
                    spent_s = time.monotonic() - begun_s
                    rate = f"{count(tokens / spent_s)} tokens/s" if spent_s > 0 else ""
                    left = f", {duration(spent_s / tokens * (total - tokens))} left" if done < len(todo) else ""
                    console.print(f"{done} of {len(todo)}: {_title(job)}, {_said(cells, attempt, outcome)}; {rate}{left}", markup=False)
    except (KeyboardInterrupt, Stopped):
        kept = sum(cell_path(cells, mark).is_file() for mark in todo)
        raise Stopped(
            f"interrupted: {kept} of the {len(todo)} cells that were missing are done and kept in {cells}; "
            "the same command goes on with the rest"
        ) from None
    return unkept


def _said(cells: Path, attempt: Attempt, outcome: Outcome) -> str:
    """How a cell came out, in a few words."""
    cell = read_cell(cells, attempt.mark, attempt.config)
    if outcome.kind == "error" or cell is None or cell.failed:
        return f"failed: {outcome.message or (cell.failed if cell else '')}"
    loss = cell.number("final_loss")
    return ("no finite loss" if loss is None else f"loss {loss:.4f}") + f" in {duration(cell.seconds or 0.0)}"


def _title(job: Job) -> str:
    return f"{job.title}, seed {job.config.seed}"


def _tokens(job: Job) -> int:
    return job.method.total_tokens


def budget(by_mark: Mapping[str, Job], there: Mapping[str, Cell], todo: Mapping[str, Job], cells: Path, processes: int) -> str:
    """What is about to be spent, in a line: cells, tokens, and the time by that of cells of the same model and sequence length."""
    said = f"{len(by_mark)} cell{'s' * (len(by_mark) != 1)} ({len(there)} cached)"
    other = len(by_mark) - len(there) - len(todo)
    if other:
        said += f", {other} of other shards"
    if not todo:
        return f"{said}: nothing to run"
    total = sum(map(_tokens, todo.values()))
    each = {_tokens(job) for job in todo.values()}
    size = f"{count(total)} tokens in all" if len(each) > 1 else f"{count(each.pop())} tokens"
    said += f": {len(todo)} run{'s' * (len(todo) != 1)} x {size}" if " in all" not in size else f": {len(todo)} runs, {size}"
    rates = _rates([*there.values(), *_others(cells, there)])
    if any(_kind(job.config) not in rates for job in todo.values()):
        return f"{said}; how long that takes is not known before one of the kind is done"
    total_s = sum(_tokens(job) * rates[_kind(job.config)] for job in todo.values())
    return f"{said}, about {duration(total_s / min(processes, len(todo)))}" + (f" with {processes} at a time" if processes > 1 else "")


def _kind(config: Config) -> tuple[str, int]:
    """What the time of a token depends on most."""
    return json.dumps(config.model.model_dump(), sort_keys=True), config.plan.sequence


def _others(cells: Path, known: Mapping[str, Cell]) -> list[Cell]:
    """Cells of other grids in the folder; what cannot be read is left out."""
    found = []
    for file in sorted(cells.glob("*.json")) if cells.is_dir() else ():
        if file.stem not in known:
            try:
                data = json.loads(file.read_text(encoding="utf-8"))
                cell = read_cell(cells, file.stem, Config.model_validate(data["config"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if cell is not None:
                found.append(cell)
    return found


def _rates(cells: Sequence[Cell]) -> dict[tuple[str, int], float]:
    """Seconds per token by kind."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for cell in cells:
        tokens = cell.number("tokens")
        if tokens and cell.seconds:
            seconds, so_far = sums.get(_kind(cell.config), (0.0, 0.0))
            sums[_kind(cell.config)] = (seconds + cell.seconds, so_far + tokens)
    return {kind: seconds / tokens for kind, (seconds, tokens) in sums.items()}


def cell_hash(job: Job, texts: dict[str, str] | None = None) -> str:
    """16 hex digits of SHA-256 over what the result depends on: CELLS_VERSION; the method as it was put together; the settings that differ
    from their defaults, but for those that the method holds, the label, the folder, threads and device; what they name: the fleet, the
    model's tensors, what the clock charges, files and recipes of your own; the text of the corpus.

    A new setting, or a new field of a method or a fleet, leaves the hash of what does not use it. Another default of a recipe changes it.

    Args:
        texts: hashes of texts that are known already, by what the configuration says of them; what is found out is added.
    """
    data = job.config.data
    texts = {} if texts is None else texts
    key = data.model_dump_json(exclude={"tokenizer", "vocab_size"})
    if key not in texts:
        texts[key] = corpora.content_mark(data)
    parts = {
        "version": CELLS_VERSION,
        "config": {k: v for k, v in non_default(job.config).items() if k not in ("method", "inner", "schedule")},
        "method": _content(job.method),
        "fleet": _content(job.fleet, leave_out=("name", "source")),
        "model": [[part.name, part.numel] for part in job.layout],
        "charge": [f"{job.flops_per_token:.9g}", f"{job.bytes_charge:.9g}"],
        "files": _files(job.config),
        "text": texts[key],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def non_default(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, as nested tables, without what leaves the result as it is. Options of the method are
    compared with the defaults of its recipe."""
    data = plain(config, LOCAL)
    recipe = find_recipe(config.method.name)
    parameters = inspect.signature(recipe).parameters
    options = check_options(recipe, config.method.options, reserved=("setting",))
    kept = {k: v for k, v in options.items() if v != parameters[k].default or type(v) is not type(parameters[k].default)}
    data["method"] = {"name": config.method.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
    return _difference(data, plain(Config()))


def _difference(given: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        usual = default.get(key)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            if inner := _difference(value, usual):
                found[key] = inner
        elif key not in default or value != usual:
            found[key] = value
    return found


def _content(value: Any, leave_out: Sequence[str] = ()) -> Any:
    """A dataclass as its name and the fields that differ from their defaults, and whatever is in them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: (getattr(value, f.name), _default(f))
            for f in dataclasses.fields(value)
            if f.init and f.compare and f.name not in leave_out
        }
        kept = {name: _content(given) for name, (given, default) in fields.items() if given != default}
        return {type(value).__name__: kept}
    if isinstance(value, Mapping):
        return sorted([[_content(k), _content(v)] for k, v in value.items()], key=repr)
    return [_content(v) for v in value] if isinstance(value, list | tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _files(config: Config) -> dict[str, str]:
    """SHA-256 of what a configuration names by path: a model's config.json, a checkpoint to go on from, the module of a recipe of your
    own, a tokenizer."""
    named: dict[str, Path] = {}
    if isinstance(config.model.config, str) and config.model.config:
        path = Path(config.model.config)
        named["model.config"] = path / "config.json" if path.is_dir() else path
    if config.model.checkpoint:
        folder = folder_of(source_of(config), weights=True)
        named |= {f"model.checkpoint/{path.name}": path for path in (folder / "config.json", *folder.glob(WEIGHTS))}
    if "." in config.method.name:
        module = importlib.import_module(config.method.name.replace(":", ".").rpartition(".")[0])
        if module.__file__:
            named["method.name"] = Path(module.__file__)
    found = {key: _sha256(path) for key, path in named.items()}
    if config.data.tokenizer not in ("bpe", "bytes"):
        found["data.tokenizer"] = tokenizer.named(config.data.tokenizer).mark
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cell_path(cells: Path, mark: str) -> Path:
    """Where the cell of a hash is."""
    return cells / f"{mark}.json"


def store(path: Path, job: Job, mark: str, *, folder: RunFolder | None, seconds: float, failed: str | None = None) -> None:
    """Writes a cell, whole or not at all: of a finished run's folder, or of a run that failed."""
    import platform

    import torch

    import gossamer

    content: dict[str, Any] = {"config": non_default(job.config), "hash": mark}
    if folder is None:
        content["failed"] = failed
    else:
        content["summary"] = folder.summary()
        evaluations = [r for r in folder.read_lines("metrics.jsonl") if r["kind"] == "eval" and r["worker"] == "fleet"]
        content["curve"] = [[r["tokens"], r["time_s"], r["loss"]] for r in evaluations]
    content["seconds"] = round(seconds, 3)
    content["versions"] = {"gossamer": gossamer.__version__, "torch": torch.__version__, "python": platform.python_version()}
    write_atomically(path, json.dumps(clean(content), separators=(",", ":"), ensure_ascii=False) + "\n")


def read_cell(cells: Path, mark: str, config: Config) -> Cell | None:
    """The cell of a hash; None where there is none.

    Raises:
        BadInput: its file is damaged.
    """
    path = cell_path(cells, mark)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["hash"] != mark:
            raise ValueError(f"it is that of {data['hash']}")
        known = Cell(config, mark, seconds=float(data["seconds"]), versions={"torch": str(data["versions"]["torch"]), **data["versions"]})
        if "failed" in data:
            return dataclasses.replace(known, failed=str(data["failed"]))
        curve = [(float(tokens), float(s), math.nan if loss is None else float(loss)) for tokens, s, loss in data["curve"]]
        summary = dict(data["summary"])
        if missing := _NEEDED - summary.keys():
            raise ValueError(f"its summary lacks {', '.join(sorted(missing))}")
        return dataclasses.replace(known, summary=summary, curve=curve)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"the cell {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"the cell {path} is damaged ({error}): delete it, and it is run again") from error


def _named(cell: Cell, config: Config) -> Cell:
    """Under the name that a configuration gives it: names are no part of the hash."""
    summary = cell.summary and {**cell.summary, "name": config.name or cell.summary["method"]}
    return dataclasses.replace(cell, config=config, summary=summary)

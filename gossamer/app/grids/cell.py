"""One cell: what is kept of a run, in a small JSON file that is named by a hash of all that the result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.app import corpora
from gossamer.app.config import LOCAL, Config, plain
from gossamer.app.folder import RunFolder, clean, write_atomically
from gossamer.app.job import Job
from gossamer.app.models import source_of
from gossamer.app.options import check_options, find_recipe
from gossamer.core.errors import BadInput
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

"""Grids: every configuration with every combination of some settings and some seeds, as one table of means with their spread.

axes = [axis("plan.steps=16,32,64"), axis("inner.lr=1e-3,3e-3")]
rows = rows_of([Path("diloco.toml")], [], axes, seeds=3)
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console

from gossamer.app.config import Config, load, override
from gossamer.app.folder import clean, write_atomically
from gossamer.app.grids.cell import Cell, cell_path
from gossamer.app.grids.cells import run_cells
from gossamer.app.grids.compare import ONE_SEED, check_comparable
from gossamer.app.grids.engines import Engine
from gossamer.app.job import resolve
from gossamer.core.errors import BadInput, RunFailed
from gossamer.report.grid_page import grid_page, heading
from gossamer.report.table import laid_out, paired, verdict
from gossamer.report.words import charged_as, clock, fixed, percent
from gossamer.report.write import write_whole
from gossamer.train.evaluate import perplexity

MAX_CELLS = 10_000
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes, as they were written."""

    key: str
    values: tuple[str, ...]

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values, when all of them are numbers."""
        try:
            return tuple(float(value) for value in self.values)
        except ValueError:
            return None


@dataclass(frozen=True)
class Row:
    """A configuration with one combination of values: a run for each seed."""

    source: str
    """What the configuration is called."""
    values: tuple[str, ...]
    """One for each axis."""
    configs: tuple[Config, ...]
    """One for each seed, from 0 on."""
    cells: tuple[Cell, ...] = ()
    """Likewise, once they have been asked for."""

    @property
    def losses(self) -> dict[str, float]:
        """Final loss by seed, in nats; seeds without a finite one are left out."""
        found = {str(cell.config.seed): cell.number("final_loss") for cell in self.cells}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def complete(self) -> bool:
        """Whether every seed has come to a finite loss."""
        return len(self.losses) == len(self.configs)

    def mean(self, key: str) -> float | None:
        """Mean over the seeds that have this number; None where none has."""
        found = [value for cell in self.cells if (value := cell.number(key)) is not None]
        return mean(found) if found else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the final loss over seeds; None with one."""
        return stdev(self.losses.values()) if len(self.losses) > 1 else None


def axis(text: str) -> Axis:
    """`key=v1,v2`, values as for --set. Commas within brackets or quotes belong to a value.

    Raises:
        BadInput: it has another form, or a value twice.

    >>> axis("plan.steps=8, 16"), axis("x=[1, 2],[3]").values
    (Axis(key='plan.steps', values=('8', '16')), ('[1, 2]', '[3]'))
    """
    key, sign, raw = (part.strip() for part in text.partition("="))
    values = [value.strip() for value in _split(raw)]
    if not sign or not _KEY.fullmatch(key) or not all(values):
        raise BadInput(f"--grid {text}: expected key=value,value,..., such as --grid plan.steps=16,32")
    if key == "seed":
        raise BadInput(f"--grid {text}: the seeds are 0, 1, ... for every configuration: give their number with --seeds")
    if key == "name":
        raise BadInput(f"--grid {text}: a name changes no result; the rows are named by their values")
    for value in values:
        if values.count(value) > 1:
            raise BadInput(f"--grid {text}: {value} is there twice")
    return Axis(key, tuple(values))


def _split(raw: str) -> list[str]:
    """At the commas outside of brackets and quotes."""
    parts, closing, quote = [""], "", ""
    for c in raw:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif closing and c == closing[-1]:
            closing = closing[:-1]
        elif c in _CLOSING:
            closing += _CLOSING[c]
        elif c == "," and not closing:
            parts.append("")
            continue
        parts[-1] += c
    return parts


def shard_of(text: str) -> tuple[int, int]:
    """`k/n` with 1 <= k <= n, as (k - 1, n).

    Raises:
        BadInput: something else.

    >>> shard_of("2/4")
    (1, 4)
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(f"--shard {text}: expected K/N with K from 1 to N, such as 2/4 for the second of four machines")
    return int(match[1]) - 1, int(match[2])


def rows_of(files: Sequence[Path], sets: Sequence[str], axes: Sequence[Axis], seeds: int, base: Path | None = None) -> list[Row]:
    """Every configuration with every combination, in their order.

    Raises:
        BadInput: an unknown key, a value that cannot be, a setting twice, too many runs.
    """
    repeated = [key for key, times in Counter(a.key for a in axes).items() if times > 1]
    if repeated:
        raise BadInput(f"--grid {repeated[0]} is given twice: put all its values into one")
    number = len(files) * math.prod(len(a.values) for a in axes) * seeds
    if number > MAX_CELLS:
        raise BadInput(f"this grid has {number:,} runs: expected at most {MAX_CELLS:,}")
    shared = [base] if base else []
    keys = {a.key for a in axes}
    plain = [load([*shared, file], sets) for file in files]
    names = [c.name or (file.stem if "method.name" in keys else c.method.name) for c, file in zip(plain, files, strict=True)]
    names = [file.stem if names.count(name) > 1 else name for name, file in zip(names, files, strict=True)]
    names = [str(file) if names.count(name) > 1 else name for name, file in zip(names, files, strict=True)]
    rows = []
    for file, name in zip(files, names, strict=True):
        for values in itertools.product(*(a.values for a in axes)):
            chosen = [f"{a.key}={value}" for a, value in zip(axes, values, strict=True)]
            one = load([*shared, file], [*sets, *chosen])
            label = " ".join([name, *(f"{a.key.rpartition('.')[2]}={value}" for a, value in zip(axes, values, strict=True))])
            rows.append(Row(name, values, tuple(override(one, {"name": label, "seed": seed}) for seed in range(seeds))))
    return rows


def run_grid(
    rows: Sequence[Row],
    axes: Sequence[Axis],
    out: Path,
    *,
    cells: Path | None,
    shard: tuple[int, int],
    jobs: int,
    keep: bool,
    console: Console,
    engine: Engine | None = None,
) -> None:
    """Runs what is missing, prints the table and writes `out`/grid.json and `out`/index.html.

    Args:
        cells: where finished runs are kept; None: `cells` in `out`.

    Raises:
        BadInput, Stopped: as `run_cells`.
        RunFailed: some cells have failed; their reasons are listed.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: choose a folder")
    folder = cells or out / "cells"
    configs = [config for row in rows for config in row.configs]
    work = out / "runs"
    found = iter(run_cells(configs, cells=folder, work=work, processes=jobs, console=console, shard=shard, keep=keep, engine=engine))
    rows = [Row(row.source, row.values, row.configs, tuple(next(found) for _ in row.configs)) for row in rows]
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()
    said = notes(rows, axes, folder)
    out.mkdir(parents=True, exist_ok=True)
    replaced = _another(out / "grid.json", rows)
    write_atomically(out / "grid.json", json.dumps(clean(as_json(rows, axes, folder, said)), indent=1, ensure_ascii=False) + "\n")
    columns, table = as_table(rows, axes)
    links = [_links(row, out, folder) for row in rows]
    of = heading([row.source for row in rows], [a.key for a in axes])
    linked = list(zip(table, links, strict=True))
    write_whole(out / "index.html", grid_page(of, title(rows), columns, linked, said, len(axes)))
    console.print()
    console.print(title(rows), markup=False)
    console.print()
    for line in (
        *as_lines(rows, axes, console.width),
        *(["* lowest mean loss of each configuration"] if _best_by_source(rows) else []),
        "",
    ):
        console.print(line, markup=False)
    for line in said:
        console.print(line, markup=False)
    if replaced:
        console.print(f"the table of another grid that was in {out} is replaced; its cells are kept in {replaced}", markup=False)
    console.print(f"table: {out / 'index.html'} and grid.json; cells: {folder}", markup=False)
    bad = [cell for row in rows for cell in row.cells if cell.failed]
    if bad:
        lines = [f"\n  {c.config.name}, seed {c.config.seed}: {c.failed}{_again(cell_path(folder, c.hash))}" for c in bad]
        raise RunFailed(f"{len(bad)} of {len(configs)} cells have failed:" + "".join(lines))


def _another(file: Path, rows: Sequence[Row]) -> str | None:
    """Where the cells are of a grid whose table is in the file and had others than these; None where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        there = {hash for row in found["rows"] for hash in row["cells"].values()}
        return None if there <= {cell.hash for row in rows for cell in row.cells} else str(found["cells"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or not ours
        return None


def _links(row: Row, out: Path, cells: Path) -> list[tuple[str, str]]:
    """A cell's file, and the folder of a run that was kept, for each seed; relative to `out`."""
    found = []
    for cell in row.cells:
        for name, path in ((f"seed {cell.config.seed}", cell_path(cells, cell.hash)), ("run", out / "runs" / cell.hash)):
            if path.exists():
                found.append((name, Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()))
    return found


def _again(path: Path) -> str:
    return f" (kept as failed; to try again, delete {path})" if path.is_file() else ""


def best_of(rows: Sequence[Row]) -> Row | None:
    """The lowest mean final loss among complete rows."""
    return min((row for row in rows if row.complete), key=lambda row: row.mean("final_loss") or math.inf, default=None)


def _best_by_source(rows: Sequence[Row]) -> dict[str, Row]:
    found = {source: best_of([row for row in rows if row.source == source]) for source in dict.fromkeys(row.source for row in rows)}
    return {source: row for source, row in found.items() if row is not None}


def title(rows: Sequence[Row]) -> str:
    """What the table holds."""
    seeds = len(rows[0].configs)
    summaries = [cell.summary for row in rows for cell in row.cells if cell.summary]
    targets = sorted({s["target_perplexity"] for s in summaries if s["target_perplexity"] is not None})
    said = [f"{len(rows)} row{'s' * (len(rows) != 1)}, means over {seeds} seed{'s' * (seeds != 1)}"]
    said += [f"target: perplexity {' / '.join(f'{t:g}' for t in targets)}"] if targets else []
    names = {str(s["charged_as"]) for s in summaries if s["charged_as"] is not None}
    return "; ".join([*said, *([charged_as(names)] if names else [])])


def as_lines(rows: Sequence[Row], axes: Sequence[Axis], width: int | None = None) -> list[str]:
    """The table as plain text. `*` marks the best of each configuration, among rows whose seeds have all come to a finite loss."""
    return laid_out(*as_table(rows, axes), 1, width)


def as_table(rows: Sequence[Row], axes: Sequence[Axis]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Columns as (name, unit), and the cells of each row."""
    heads = [("configuration", ""), *((a.key, "") for a in axes), ("seeds", ""), ("loss", "nats"), ("±", "nats"), ("perplexity", "")]
    heads += [("time to target", "h:mm:ss"), ("total time", "h:mm:ss"), ("utilisation", "%"), ("straggler idle", "%")]
    heads += [("network idle", "%"), ("against the best", "nats")]
    best, marked = best_of(rows), _best_by_source(rows)
    lines = []
    for row in rows:
        loss = row.mean("final_loss")
        lines.append(
            [
                row.source,
                *row.values,
                f"{len(row.losses)}" + ("" if row.complete else f" of {len(row.configs)}"),
                ("* " if marked.get(row.source) is row else "") + fixed(loss, 4),
                fixed(row.spread, 4),
                fixed(None if loss is None else perplexity(loss), 2),
                _time_to_target(row),
                clock(row.mean("wall_s")),
                *(percent(row.mean(key)) for key in ("utilisation", "straggler_idle", "network_idle")),
                _against(row, best),
            ]
        )
    return heads, lines


def _time_to_target(row: Row) -> str:
    """A mean over the seeds that reached it, and how many these are when not all did."""
    reached = sum(cell.number("time_to_target_s") is not None for cell in row.cells)
    said = clock(row.mean("time_to_target_s"))
    return said if reached in (0, len(row.configs)) else f"{said} ({reached} of {len(row.configs)})"


def _against(row: Row, best: Row | None) -> str:
    if best is None or not row.losses:
        return ""
    if row is best:
        return "best"
    found = paired(row.losses, best.losses)
    if found is None:
        middle = mean(row.losses.values()) - mean(best.losses.values())
        return f"{middle:+.4f}"
    return "not distinguishable" if verdict(*found) == "not distinguishable" else f"{found[0]:+.4f} ± {found[1]:.4f}"


def notes(rows: Sequence[Row], axes: Sequence[Axis], cells: Path) -> list[str]:
    """What must be said below the table: best values on an edge, the best of each configuration against each other by paired seeds, what
    cannot be compared, what is missing."""
    said = []
    best = _best_by_source(rows)
    for source, row in best.items():
        for a, value in zip(axes, row.values, strict=True):
            numbers = a.numbers
            if numbers and len(set(numbers)) > 1 and float(value) in (min(numbers), max(numbers)):
                end = "smallest" if float(value) == min(numbers) else "largest"
                said.append(f"{source}: its best {a.key}, {value}, is the {end} value tried, an edge of the grid: the best may lie beyond")
    lowest = best_of(list(best.values()))
    for source, row in best.items():
        if lowest is not None and row is not lowest and (found := paired(row.losses, lowest.losses)) is not None:
            middle, spread, seeds = found
            said.append(
                f"{source} minus {lowest.source}, each at its best: {middle:+.4f} ± {spread:.4f} nats per token over {seeds} seeds, "
                f"{verdict(*found)}."
            )
    if rows and len(rows[0].configs) == 1:
        said.append(ONE_SEED)
    try:
        check_comparable([resolve(row.configs[0]) for row in rows])
    except BadInput as error:
        said.append(f"Not all rows can be compared: {error}.")
    versions = {cell.versions["torch"] for row in rows for cell in row.cells if cell.versions}
    if len(versions) > 1:
        said.append(f"The cells were made with several versions of torch: {', '.join(sorted(versions))}.")
    missing = sum(cell.summary is None and cell.failed is None for row in rows for cell in row.cells)
    if missing:
        said.append(
            f"{missing} cells of other shards are missing: once all are in {cells}, the same command without --shard makes the whole table."
        )
    return said


def as_json(rows: Sequence[Row], axes: Sequence[Axis], cells: Path, said: Sequence[str]) -> dict[str, Any]:
    """The content of grid.json."""
    best, marked = best_of(rows), _best_by_source(rows)
    numbers = ("wall_s", "time_to_target_s", "utilisation", "straggler_idle", "network_idle")

    def line(row: Row) -> dict[str, Any]:
        found = paired(row.losses, best.losses) if best is not None and row is not best else None
        return {
            "configuration": row.source,
            "values": dict(zip((a.key for a in axes), row.values, strict=True)),
            "cells": {str(cell.config.seed): cell.hash for cell in row.cells},
            "losses": row.losses,
            "final_loss": row.mean("final_loss"),
            "spread": row.spread,
            **{key: row.mean(key) for key in numbers},
            "best": marked.get(row.source) is row,
            "against_best": found and {"mean": found[0], "spread": found[1], "seeds": found[2], "verdict": verdict(*found)},
            "failed": {str(cell.config.seed): cell.failed for cell in row.cells if cell.failed},
        }

    return {
        "title": title(rows),
        "grid": {a.key: list(a.values) for a in axes},
        "seeds": len(rows[0].configs),
        "cells": str(cells),
        "rows": [line(row) for row in rows],
        "notes": list(said),
    }

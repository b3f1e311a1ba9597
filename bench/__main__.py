"""Runs all measurements, each in a process of its own, and prints one table.

    python -m bench [codec sim_events sim_scale logical overhead]     # some of them; all by default

Each line has the figure, its aim and whether it is met. A missed aim is news, not a failure: other work on the machine moves the figures.
The exit code is 1 only if a measurement could not be made. Details are in results/*.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.common import machine, median, read, spread, write


class Line(NamedTuple):
    """A row of the table."""

    what: str
    figure: str
    aim: str = ""
    met: bool | None = None
    """None: for information, there is no aim."""


class Part(NamedTuple):
    """One measurement."""

    arguments: tuple[str, ...]
    lines: Callable[[Mapping[str, Any]], list[Line]]
    """From the content of results/<name>.json."""
    repeats: int = 1
    """Fresh processes. The script takes medians itself where this is 1."""


def _at_least(what: str, value: float, aim: float) -> Line:
    return Line(what, f"{value:.2f}", f"at least {aim:.1f}", value >= aim)


def _codec(found: Mapping[str, Any]) -> list[Line]:
    row = found["results"]

    def line(what: str, name: str, aim: float) -> Line:
        return _at_least(f"{what} ({row[name]['gb_s']:.1f} GB/s), to the copy", row[name]["of_copy"], aim)

    kinds = ("tensor", "row", "block 256")
    peaks = [row[f"sign {kind}: {what}"]["peak_mb"] for kind in kinds for what in ("feedback + stats + encode", "decode + add")]
    lines = [
        Line(f"plain copy of float32 numbers, {found['setting']['preset']}, one thread", f"{row['copy_ (torch)']['gb_s']:.1f} GB/s"),
        line("sign encode", "sign tensor: encode", 0.8),
        line("sign decode and add", "sign tensor: decode + add", 0.6),
        *(line(f"  encode with its magnitudes, by {kind}", f"sign {kind}: stats + encode", 0.4) for kind in kinds),
        *(line(f"  the same with error feedback, by {kind}", f"sign {kind}: feedback + stats + encode", 0.4) for kind in kinds),
        *(line(f"  decode and add, by {kind}", f"sign {kind}: decode + add", 0.3) for kind in kinds[1:]),
    ]
    if None not in peaks:
        most, limit = max(peaks), found["setting"]["largest_tensor_mb"]
        lines.append(Line("  memory beside the trees and the payload", f"{most:.0f} MB", f"under {limit:.0f} MB", most < limit))
    return lines


def _sim_events(found: Mapping[str, Any]) -> list[Line]:
    run = found["simulator"]
    what = f"simulator without tensors: {run['workers']:,} workers x {run['rounds']} rounds"
    return [Line(what, f"{run['seconds']:.1f} s", "under 10 s", run["seconds"] < 10.0), Line("  its CPU time", f"{run['cpu_s']:.1f} s")]


def _sim_scale(found: Mapping[str, Any]) -> list[Line]:
    rows, aim = found["curve"], found["aim"]
    last = rows[-1]
    memory, limit = last["peak_memory_mib"], aim["memory_mib"]
    what = f"simulator without tensors: {last['workers']:,} workers x {last['rounds']} rounds"
    gossip, ring = last["virtual_s_a_round"], last["ring_virtual_s_a_round"]
    return [
        Line(what, f"{last['seconds']:.1f} s", f"under {aim['seconds']:.0f} s", last["seconds"] < aim["seconds"]),
        Line("  its CPU time", f"{last['cpu_s']:.1f} s"),
        Line("  its memory", f"{memory} MiB", f"under {limit} MiB", memory < limit),
        Line(f"  growth of CPU time from {rows[0]['workers']} workers on, n to the power of", f"{found['exponent']:.2f}"),
        Line("  a round on its clock: two peers, and DiLoCo's ring", f"{gossip:.2f} s, {ring:.0f} s"),
    ]


def _logical(found: Mapping[str, Any]) -> list[Line]:
    of, aim = found["setting"], found["aim"]["ratio"]
    return [
        _at_least(f"{of['workers']} logical workers to a bare loop: {method}, H = {of['steps']}, {of['preset']}", row["ratio"], aim)
        for method, row in found["results"].items()
    ]


def _overhead(found: Mapping[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for row in found["results"]:
        aim, outside = row["aim"], row["outside"]
        what = f"{found['setting']['workers']} processes, outside inner steps: {row['method']}, H = {row['steps']}"
        lines += [
            Line(what, f"{outside:.1%}", "" if aim is None else f"under {aim:.0%}", None if aim is None else outside < aim),
            Line("  without waiting for the other's inner steps", f"{row['outside_without_straggler_idle']:.1%}"),
            Line("  its exchange to torch's all_reduce, seconds", f"{row['exchange_of_all_reduce']:.1f} x"),
        ]
    return lines


PARTS: dict[str, Part] = {
    "codec": Part((), _codec),
    "sim_events": Part((), _sim_events, repeats=3),
    "sim_scale": Part((), _sim_scale),
    "logical": Part((), _logical),
    "overhead": Part((), _overhead),
}


def measure(name: str, part: Part) -> dict[str, Any]:
    """Runs one measurement and returns what it wrote, with date, machine and command.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    words = ["-m", f"bench.{name}", *part.arguments]
    about = machine()
    found = []
    for _ in range(part.repeats):
        run = subprocess.run(
            [sys.executable, *words],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"{' '.join(['python', *words])} ended with code {run.returncode}:\n{run.stderr or run.stdout}")
        found.append(read(name))
    content = found[0] if part.repeats == 1 else _medians(found)
    content = {**about, "command": " ".join(["python", *words]), "processes": part.repeats, **content}
    write(name, content)
    return content


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number in tables of numbers, and under "repeats" the numbers themselves where they differ."""
    out: dict[str, Any] = {}
    for name, row in found[0].items():
        columns = {key: [f[name][key] for f in found] for key in row}
        out[name] = {key: values[0] if len(set(values)) == 1 else median(values) for key, values in columns.items()}
        out[name]["repeats"] = {key: spread(values) for key, values in columns.items() if len(set(values)) > 1}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"which: {', '.join(PARTS)} (default: all)")
    asked = parser.parse_args().parts or list(PARTS)
    for name in asked:
        if name not in PARTS:
            parser.error(f"there is no measurement {name!r}; expected one of {', '.join(PARTS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    at = machine()
    console.print(f"{at['cpu']}, {at['cores']} cores, load {at['load']}; torch {at['torch']}", highlight=False)
    table = Table("measured", "figure", "aim", "met", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    failures: list[str] = []
    for name in asked:
        begin = time.monotonic()
        try:
            lines = PARTS[name].lines(measure(name, PARTS[name]))
        except RuntimeError as error:
            failures.append(str(error))
            lines = [Line(name, "failed")]
        console.print(f"measured {name} in {time.monotonic() - begin:.0f} s", style="dim", highlight=False)
        for line in lines:
            met = "" if line.met is None else "[green]yes[/]" if line.met else "[red]missed[/]"
            table.add_row(line.what, line.figure, line.aim, met)
    console.print(table)
    console.print("Details: bench/results/*.json. What each figure means: bench/README.md.", highlight=False)
    for failure in failures:
        console.print(f"\n{failure}", style="red", highlight=False, markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`gossamer profile`: what each worker can do and what lies between them, measured, as a fleet file that plans read.

Every worker measures its own inner steps, all at the same time, as they would train; then the links are measured, one at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.app import fleets
from gossamer.app.config import Config, config_hash, dump, load, override
from gossamer.app.folder import write_atomically
from gossamer.app.job import Job, resolve
from gossamer.app.planning import memory
from gossamer.app.planning.measure import GAIN, WARM_UP, Measured, Point, matmul_tflops, measure
from gossamer.app.progress import count
from gossamer.core.errors import BadInput, RunFailed, Stopped
from gossamer.core.fleet_parse import parse_fleet
from gossamer.core.tree import numel
from gossamer.net.launch import launch
from gossamer.net.probe import LinkMeasure, measure_links
from gossamer.net.start import STORE_ENV, init
from gossamer.real.group import Group

MARK = "# Measured by gossamer profile."
"""The first line of a profile: such a file may be overwritten."""
_SHOWN_WORKERS, _SHOWN_LINKS = 8, 30


@dataclass(frozen=True)
class WorkerProfile:
    """One worker, as it goes to worker 0."""

    name: str
    gpu: str
    tflops: float
    """Of a matrix product, measured."""
    total_gb: float
    """Memory of the device."""
    limit_gb: float | None
    """What the worker may use of it; None: all."""
    measured: Measured

    @classmethod
    def of_json(cls, data: bytes) -> WorkerProfile:
        """Back from `json.dumps(asdict(profile))`."""
        table = json.loads(data)
        m = table.pop("measured")
        half = m["half_gb"] and (m["half_gb"][0], m["half_gb"][1])
        return cls(**table, measured=Measured(tuple(Point(**p) for p in m["points"]), half, m["ended"]))


@dataclass(frozen=True)
class Request:
    """What to measure, and where to put it."""

    config: Config
    batches: tuple[int, ...] | None
    """Sequences per step, rising; None: doubling."""
    steps: int
    """To time at each batch size, at least."""
    memory_limit_gb: float | None
    """That a worker may use; None: its share of what there is."""
    out: Path


def batches_of(text: str) -> tuple[int, ...]:
    """The batch sizes of a command line.

    >>> batches_of("1,2, 8")
    (1, 2, 8)
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) < 2 or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise BadInput(f"--batches {text!r}: expected two or more whole numbers, 1 or more and rising, such as 1,2,4,8")
    return found


def request(
    configs: Sequence[Path],
    sets: Sequence[str],
    workers: int,
    *,
    batches: str | None,
    steps: int,
    memory_limit_gb: float | None,
    out: Path,
) -> Request:
    """Reads and checks what was asked for.

    The configuration gives model, inner optimizer, data and sequence length. Its plan does not matter, nor does its fleet, which may be the
    file that is to be written: where that does not exist yet, the workers are alike, and none slows down.
    """
    config = override(load(configs, sets), {"clock.slow_worker": -1})
    name = config.fleet.name
    if (name.endswith(".toml") and not Path(name).exists()) or (name == "uniform" and config.fleet.workers is None):
        config = override(config, {"fleet.name": "uniform", "fleet.workers": max(2, workers)})
    if max(fleets.load(config.fleet.name, config.fleet.workers).ranks) > 1:
        raise BadInput(
            f"fleet {config.fleet.name} has workers of several ranks, and gossamer profile measures one GPU a worker: profile a fleet "
            "without ranks, and add ranks to what it writes, with step_s and memory_gb as all GPUs of a worker together need them"
        )
    if memory_limit_gb is not None and not 0 < memory_limit_gb < math.inf:
        raise BadInput(f"--memory-limit-gb {memory_limit_gb}: expected a number of GB above 0, such as 24")
    return Request(config, batches_of(batches) if batches else None, steps, memory_limit_gb, out)


def check_out(path: Path) -> None:
    """Refuses what a profile cannot be written to, before anything is measured.

    Raises:
        BadInput: no .toml, a file that is no profile, a folder that is not there or cannot be written.
    """
    if path.suffix != ".toml":
        raise BadInput(f"--out {str(path)!r}: a fleet file ends in .toml, such as profile.toml")
    try:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                if not file.readline().startswith(MARK):
                    raise BadInput(f"{path} exists and is no profile: move it away, or choose another file with --out")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        Path(name).unlink()
    except (OSError, ValueError) as error:  # BadInput is a ValueError: it passes as it is; so is a NUL in the name
        if isinstance(error, BadInput):
            raise
        said = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{str(path)!r} cannot be written ({said}): choose another file with --out, in a folder where you may write"
        ) from None


def launch_local(ask: Request, n: int) -> None:
    """Profiles n workers, as processes on this machine.

    Raises:
        BadInput: the file cannot be written, or a worker refused its input.
        RunFailed: a worker failed; what it was has been said.
        Stopped: interrupted.
    """
    check_out(ask.out)
    resolve(ask.config).corpus()  # refused here and made once, before all workers ask for it
    folder = Path(tempfile.mkdtemp(prefix="gossamer-profile-"))
    config = folder / "config.toml"
    config.write_text(dump(ask.config), encoding="utf-8")
    command = [sys.executable, "-m", "gossamer", "profile", str(config), "--out", str(ask.out), "--steps", str(ask.steps)]
    if ask.batches:
        command += ["--batches", ",".join(map(str, ask.batches))]
    if ask.memory_limit_gb is not None:
        command += ["--memory-limit-gb", repr(ask.memory_limit_gb)]
    code = launch(n, command, folder / "logs", env={"OMP_NUM_THREADS": str(ask.config.run.threads_per_worker)}, rounds=False)
    if code in (1, 2):
        failure = f"a worker {'refused its input' if code == 2 else 'failed'}; its words are above, or in {folder / 'logs'}"
        raise BadInput(failure) if code == 2 else RunFailed(failure)
    shutil.rmtree(folder, ignore_errors=True)
    if code:
        raise Stopped("interrupted: nothing was written")


def work(ask: Request, console: Console) -> None:
    """One worker, in this process: the only one, or one of several that our launcher or torchrun has started.

    Raises:
        BadInput: the file cannot be written, or what was asked for cannot be.
        RunFailed: another worker is gone.
    """
    first = os.environ.get("RANK", "0") == "0"
    if first:
        check_out(ask.out)
    torch.set_num_threads(ask.config.run.threads_per_worker)
    job = resolve(ask.config)
    corpus = job.corpus()
    with init() as group:
        asked = f"batches {ask.batches}, steps {ask.steps}"
        group.all_equal({"configuration": config_hash(ask.config), "request": asked, "torch": torch.__version__})  # all begin together
        with console.status("measuring steps") if first else nullcontext():
            measured = measure(
                job,
                group.me,
                corpus,
                batches=ask.batches,
                steps=ask.steps,
                limit_gb=ask.memory_limit_gb or memory.total_gb(job.device) / _sharers(job.device),
                say=lambda point: _say(console, point) if first else None,
            )
            mine = _mine(ask, job, group, measured)
            told = group.gather_bytes(json.dumps(asdict(mine)).encode())  # worker 0 knows now that nobody is computing
        with console.status(f"measuring {group.n * (group.n - 1)} links, one at a time") if first else nullcontext():
            links = group.gather_bytes(json.dumps([asdict(link) for link in measure_links(group)]).encode())
        if told is None or links is None:
            return
        workers = [WorkerProfile.of_json(data) for data in told]
        found = [LinkMeasure(**link) for data in links for link in json.loads(data)]
    data = fleet_data(ask.out.stem, _source(job), workers, found)
    parse_fleet(data, {})
    write_atomically(ask.out, fleet_text(data))
    show(console, workers, found)
    console.print(f"profile: {ask.out} (use it with --set fleet.name={ask.out})", markup=False)


def _say(console: Console, point: Point) -> None:
    console.print(
        f"batch {point.batch}, {point.tokens:,} tokens: {point.step_s:.4g} s, {count(point.rate)} tokens/s, {point.memory_gb:.3g} GB",
        markup=False,
    )


def _sharers(device: torch.device) -> int:
    """Workers on this machine that share the memory of `device`."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -(-here // torch.cuda.device_count()) if device.type == "cuda" else here


def _mine(ask: Request, job: Job, group: Group, measured: Measured) -> WorkerProfile:
    device, host = job.device, socket.gethostname()
    total_gb, sharers = memory.total_gb(device), _sharers(device)
    name = f"worker-{group.me}" if STORE_ENV in os.environ else host if group.n == 1 else f"{host}-{group.me}"
    limit_gb = ask.memory_limit_gb or (total_gb / sharers if sharers > 1 else None)
    gpu = memory.device_name(device, job.config.run.threads_per_worker)
    return WorkerProfile(name, gpu, matmul_tflops(device, job.precision), total_gb, limit_gb, measured)


def _source(job: Job) -> str:
    config = job.config
    return (
        f"measured by gossamer profile on {time.strftime('%Y-%m-%d')}: {count(numel(job.layout))} parameters, sequences of "
        f"{config.plan.sequence} tokens, {type(job.method.inner).__name__}, {job.precision}"
    )


def fleet_data(name: str, source: str, workers: Sequence[WorkerProfile], links: Iterable[LinkMeasure]) -> dict[str, Any]:
    """The fleet as a fleet file has it: a site for each worker, which is a region of its own, and a link for each directed pair.

    A worker's lines are the best of its links, which were alone; without a link they limit nothing. Of workers with one device name
    the best rate and the least memory describe the device. Numbers are rounded to six digits.
    """
    links = list(links)
    cards: dict[str, dict[str, float]] = {}
    for w in workers:
        card = cards.setdefault(w.gpu, {"tflops": 0.0, "memory_gb": math.inf})
        card |= {"tflops": max(card["tflops"], _six(w.tflops)), "memory_gb": min(card["memory_gb"], _six(w.total_gb))}
    sites = []
    for i, w in enumerate(workers):
        site: dict[str, Any] = {"name": w.name, "region": w.name, "gpu": w.gpu}
        site["up_mbps"] = max((_six(link.rate_mbps) for link in links if link.frm == i), default=math.inf)
        site["down_mbps"] = max((_six(link.rate_mbps) for link in links if link.to == i), default=math.inf)
        site["step_s"] = [[p.tokens, _six(p.step_s)] for p in w.measured.points]
        site["memory_gb"] = [[tokens, _six(gb)] for tokens, gb in w.measured.memory_gb]
        if len(site["memory_gb"]) < 2:
            del site["memory_gb"]
        if w.limit_gb is not None:
            site["memory_limit_gb"] = _six(w.limit_gb)
        sites.append(site)
    names = [w.name for w in workers]
    wires = [
        {"from": names[link.frm], "to": names[link.to], "rate_mbps": _six(link.rate_mbps), "rtt_ms": _six(link.rtt_ms)} for link in links
    ]
    return {"name": name, "source": source, "gpus": cards, "sites": sites, **({"links": wires} if wires else {})}


def fleet_text(data: Mapping[str, Any]) -> str:
    """`fleet_data` as TOML, one line for each list of points."""
    lines = [MARK, *_keys({k: v for k, v in data.items() if isinstance(v, str)})]
    for name, card in data["gpus"].items():
        lines += ["", f"[gpus.{_value(name)}]", *_keys(card)]
    for what in ("sites", "links"):
        for table in data.get(what, []):
            lines += ["", f"[[{what}]]", *_keys(table)]
    return "\n".join(lines) + "\n"


def _keys(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, str):  # a JSON text is a TOML text, but for one letter
        return json.dumps(value).replace("\x7f", "\\u007f")
    return "[" + ", ".join(_value(v) for v in value) + "]" if isinstance(value, list) else repr(value)


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def show(console: Console, workers: Sequence[WorkerProfile], links: Sequence[LinkMeasure]) -> None:
    """Prints what was measured."""
    table = _table("Inner steps", "worker", ("batch", "tokens", "step\ns", "tokens/s", "memory\nGB", ""))
    for w in workers[:_SHOWN_WORKERS]:
        for p in w.measured.points:
            marks = ["knee"] * (p.batch == w.measured.knee) + ["disturbed"] * (p.batch in w.measured.disturbed)
            table.add_row(w.name, str(p.batch), f"{p.tokens:,}", f"{p.step_s:.4g}", count(p.rate), f"{p.memory_gb:.3g}", ", ".join(marks))
    console.print(table)
    if len(workers) > _SHOWN_WORKERS:
        console.print(f"... and {len(workers) - _SHOWN_WORKERS} more workers, in the file")
    console.print(
        f"knee: the smallest batch with {100 - 100 * GAIN:.0f} % of the best tokens/s; each time is a median, after {WARM_UP} steps"
    )
    for w in workers[:_SHOWN_WORKERS]:
        console.print(f"{w.name}: no larger batch, since {w.measured.ended}", markup=False)
    if any(w.measured.disturbed for w in workers):
        console.print(
            "disturbed: step times that differ much, or fewer tokens/s than at the batches before and after: something else had the "
            "machine. Measure again when it has nothing else to do"
        )
    if not links:
        return
    names = [w.name for w in workers]
    table = _table("Links, one at a time", "from", ("to", "Mbit/s", "round trip\nms", "message\nMB"))
    for link in links[:_SHOWN_LINKS]:
        row = (f"{link.rate_mbps:.4g}", f"{link.rtt_ms:.3g}", f"{link.probe_bytes / 1e6:.3g}")
        table.add_row(names[link.frm], names[link.to], *row)
    console.print(table)
    if len(links) > _SHOWN_LINKS:
        console.print(f"... and {len(links) - _SHOWN_LINKS} more links, in the file")


def _table(title: str, first: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_style="bold", title_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table

"""The demonstration: one model trained by four unlike workers, for real and under the virtual clock, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.app.config import dump, override, parse
from gossamer.app.export import export
from gossamer.app.folder import RunFolder, check_new, default_path, write_atomically
from gossamer.app.grids.compare import compare
from gossamer.app.job import Job, resolve
from gossamer.app.train import launch_local
from gossamer.app.zeroshot.evaluation import SUITE, Request
from gossamer.app.zeroshot.evaluation import run as zeroshot
from gossamer.app.zeroshot.harness import check_installed
from gossamer.core.errors import BadInput, RunFailed
from gossamer.report import page, read, table

BASE: dict[str, Any] = {
    "plan": {"steps": 16, "batch": 8, "sequence": 128},
    "model": {"preset": "tiny"},
    "data": {"limit_mb": 8.0},
    "fleet": {"name": "azure-4"},
    "clock": {"charge_as": "llama-150m", "charge_tokens": 65_536, "pace_s": 0.15},
    "eval": {"sequences": 64, "target_perplexity": 200.0},
    "run": {"rounds": 10},
}
"""What all runs of the demonstration share."""

METHODS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"method.name": "diloco"},
    "GeoMesh": {"method.name": "geomesh"},
    "GASLoC two-peer": {"method.name": "gasloc", "method.topology": "two_peer", "plan.name": "proportional"},
}
"""What sets them apart. DiLoCo gives every worker equal work, as published; the other two plan by speed, with as many tokens in all."""


ITEMS = 200
"""Of each task of the embedded suite."""


def jobs() -> dict[str, Job]:
    """The demonstration's runs by title."""
    return {title: resolve(override(parse(BASE), {"name": title, **values})) for title, values in METHODS.items()}


def demo(out: Path | None, console: Console) -> Path:
    """Runs it all and returns the path of the report.

    Raises:
        BadInput: the folder exists and is not empty.
        RunFailed: the real run and its simulation end with different parameters.
    """
    out = out or default_path("demo")
    check_new(out)
    planned = jobs()
    geomesh = planned["GeoMesh"]
    out.mkdir(parents=True, exist_ok=True)
    console.print("About 4 minutes: a real run in four processes, then three simulations of the same.\n")
    _prepare(geomesh, console)
    console.print("\n1 of 3: GeoMesh for real: four processes here, paced like an H100, an A100, an L40S and an RTX 6000 Ada", style="bold")
    real = launch_local(_save(geomesh, out / "real.toml", {"name": "GeoMesh, real"}), out / "geomesh-real")
    console.print("\n2 of 3: the same data and fleet under the virtual clock: DiLoCo, GeoMesh, GASLoC", style="bold")
    simulated = compare(list(planned.values()), out)
    same = _same(real, simulated[list(planned).index("GeoMesh")])
    console.print("\n3 of 3: the real run's model as transformers loads it, asked about text that it has not seen", style="bold")
    model = export(real, out / "model")
    _scores(real, console)
    folders = [real, *simulated]
    page.write_page([real], real / "report.html")
    path = page.write_page(folders, out / "report.html")
    console.print()
    console.print(table.as_text([read.Run.load(f) for f in folders], console.width), markup=False)
    console.print()
    console.print(f"The real run and its simulation end with the same parameters, bit for bit: sha256 {same[:16]}...")
    console.print("A short run with one seed shows the machinery; it does not rank the methods.")
    console.print(f"model: {model} (transformers.AutoModelForCausalLM.from_pretrained loads it)")
    console.print(f"report: {path} (of the real run alone: {real / 'report.html'})")
    return path


def _scores(run: Path, console: Console) -> None:
    """Accuracies of the embedded suite, where lm-eval is installed."""
    try:
        check_installed()
    except BadInput as missing:
        console.print(f"no zero-shot scores: {missing}", markup=False)
        return
    zeroshot(run, Request(tasks=(SUITE,), limit=ITEMS), None, console)


def _prepare(job: Job, console: Console) -> None:
    """Tokens, made once: it is said, because it takes a while."""
    console.print("reading the text of Python's standard library, and training a tokenizer on it (once) ...")
    corpus = job.corpus()
    console.print(f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} to validate on")


def _save(job: Job, path: Path, values: dict[str, Any]) -> Job:
    config = override(job.config, values)
    write_atomically(path, dump(config))
    return resolve(config)


def _same(real: Path, simulated: Path) -> str:
    a, b = (RunFolder(folder).summary()["params_sha256"] for folder in (real, simulated))
    if a != b:
        raise RunFailed(
            f"the real run {real} and its simulation {simulated} end with different parameters ({a} against {b}): a bug, please report it"
        )
    return str(a[0])

"""What the measurements share: medians, result files, and a job to measure."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gossamer.app.config import parse
from gossamer.app.job import Job, resolve

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """When and on what: what a reader needs to judge the figures. `load` is the machine's one-minute load average at this moment; about
    0 before a quiet run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cpu": _cpu(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command(module: str) -> str:
    """How this measurement was asked for, in words that work on any machine."""
    return " ".join(["python -m", module, *sys.argv[1:]])


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Writes `results/<name>.json` whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{name}-", suffix=".json", dir=RESULTS)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.write(json.dumps(content, indent=2) + "\n")
    os.chmod(scratch, 0o644)
    path = RESULTS / f"{name}.json"
    os.replace(scratch, path)
    return path


def read(name: str) -> dict[str, Any]:
    """The content of `results/<name>.json`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def median(values: Iterable[float]) -> float:
    """The median, to four significant digits."""
    return float(f"{statistics.median(values):.4g}")


def spread(values: Iterable[float]) -> list[float]:
    """All repeats, in the order they were taken, to four significant digits."""
    return [float(f"{v:.4g}") for v in values]


def job(method: str, *, workers: int, steps: int, rounds: int, preset: str, batch: int, sequence: int, options: Mapping[str, Any]) -> Job:
    """A run of `workers` equal workers on the embedded corpus, on the CPU, with no evaluation in between."""
    vocab = {"tiny": 1024, "small": 2048}[preset]
    return resolve(
        parse(
            {
                "method": {"name": method, **options},
                "plan": {"name": "uniform", "steps": steps, "batch": batch, "sequence": sequence},
                "model": {"preset": preset, "precision": "fp32"},
                "data": {"vocab_size": vocab},
                "eval": {"every": 0},
                "fleet": {"name": "uniform", "workers": workers},
                "run": {"rounds": rounds, "device": "cpu", "threads_per_worker": 1},
            }
        )
    )


def _cpu() -> str:
    """The processor's name where the system tells it."""
    try:
        if sys.platform == "darwin":
            return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()

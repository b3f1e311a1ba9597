"""Peak memory of what this process does, and how much there is.

On a GPU torch's own count of allocated bytes. On a CPU the peak of the resident set: Linux keeps it (VmHWM) and forgets it when asked
(/proc/self/clear_refs). Where that cannot be done, the same work is done once more in a process of its own, whose peak is its own.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.core.errors import RunFailed

_PROC = Path("/proc/self")
_TRIAL_BYTES = 64_000_000


def reset_peak(device: torch.device) -> None:
    """Forgets earlier peaks, after giving back what is free. On a CPU only where `can_reset` says so."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    (_PROC / "clear_refs").write_text("5")


def peak_gb(device: torch.device) -> float:
    """Peak since `reset_peak`, in GB = 1e9 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return _status_gb("VmHWM")


def used_gb(device: torch.device) -> float:
    """Now, in GB."""
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else _status_gb("VmRSS")


@lru_cache(maxsize=1)
def can_reset() -> bool:
    """Whether this system forgets the peak of a process's resident set, by trial."""
    try:
        block = np.ones(_TRIAL_BYTES, dtype=np.uint8)
        high_gb = _status_gb("VmHWM")
        del block
        reset_peak(torch.device("cpu"))
        return _status_gb("VmHWM") < high_gb - 0.5e-9 * _TRIAL_BYTES
    except (OSError, RunFailed):
        return False


def peak_in_child_gb(work: Callable[..., Any], *arguments: Any) -> float:
    """Peak resident set of a fresh process that does `work(*arguments)`: a function of a module, and values that can be pickled.

    Raises:
        RunFailed: the process ended without an answer; memory may have run out.
    """
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_child, work, arguments).result()
    except OSError as error:  # BrokenProcessPool is a RuntimeError, see below
        raise RunFailed(f"no process to measure memory in could be started ({error})") from error
    except RuntimeError as error:
        raise RunFailed(f"the process that measures memory ended without an answer ({error}): declare less work, or a limit") from error


def _child(work: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    work(*arguments)
    with suppress(OSError, RunFailed):
        return _status_gb("VmHWM")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak * (1 if sys.platform == "darwin" else 1024) / 1e9)


def _status_gb(key: str) -> float:
    """A size of /proc/self/status, which Linux gives in units of 1024 bytes."""
    for line in (_PROC / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024 / 1e9
    raise RunFailed(f"this system does not tell {key} of a process")


def total_gb(device: torch.device) -> float:
    """Memory of the GPU; or of the machine, less where the process's control group has less. In GB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files():
        with suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(path.read_text()))
    return min(found) / 1e9


def _limit_files() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    files = [root / "memory" / "memory.limit_in_bytes"]  # version 1
    with suppress(OSError):
        for line in (_PROC / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = root / line.removeprefix("0::/").strip()
                files += [p / "memory.max" for p in (own, *own.parents) if p.is_relative_to(root)]
    return files


def device_name(device: torch.device, threads: int) -> str:
    """What a person would call it: model, threads of a CPU, and memory."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {total_gb(device):.0f} GB"
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"CPU {model}, {threads} thread{'s' * (threads > 1)}, {total_gb(device):.0f} GB"

"""Fleets by name, or from a TOML file of your own.

>>> fleet = load("azure-4")
>>> fleet.n, fleet.site(0).gpu.name, load("uniform-12").n
(4, 'H100 80GB', 12)
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.core.fleet import MAX_WORKERS, Fleet, Gpu
from gossamer.core.fleet_parse import nearest, parse_fleet, parse_gpus

_GPUS = "gpus"
_UNIFORM = re.compile(r"uniform(?:-(\d+))?")


def _folder() -> Any:
    return resources.files("gossamer").joinpath("fleets")


@lru_cache(maxsize=1)
def presets() -> tuple[str, ...]:
    """Names of the built-in fleets; "uniform" stands for "uniform-N" with any number of workers."""
    names = (entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name for name in names if name != _GPUS))


@lru_cache(maxsize=1)
def _known_gpus() -> tuple[tuple[str, Gpu], ...]:
    text = _folder().joinpath(f"{_GPUS}.toml").read_text(encoding="utf-8")
    return tuple(parse_gpus(tomllib.loads(text)).items())


def gpus() -> dict[str, Gpu]:
    """The GPUs that a fleet may name without describing them."""
    return dict(_known_gpus())


def load(name_or_path: str | Path, workers: int | None = None) -> Fleet:
    """A built-in fleet by name ("azure-4", "uniform-1000", ...) or the fleet of a TOML file (a Path, or a text that ends in ".toml").

    Args:
        workers: the number of workers of "uniform"; with any other fleet it must be the number that the fleet has.

    Raises:
        BadInput: an unknown name (the nearest is named), a file that cannot be read or is not TOML, a description that cannot work.
    """
    fleet = _find(name_or_path, workers)
    if workers is not None and workers != fleet.n:
        raise BadInput(
            f"fleet {fleet.name!r} has {fleet.n} workers and {workers} were asked for: drop the number, or use 'uniform-{workers}'"
        )
    return fleet


def _find(name_or_path: str | Path, workers: int | None) -> Fleet:
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        return _from_file(Path(name_or_path))
    match = _UNIFORM.fullmatch(name_or_path)
    if match:
        if match[1] and len(match[1]) > len(str(MAX_WORKERS)):
            raise BadInput(f"fleet '{name_or_path[:20]}...' has too many workers: a fleet has at most {MAX_WORKERS:,}")
        n = int(match[1]) if match[1] else workers
        if n is None:
            raise BadInput("fleet 'uniform' needs a number of workers: say 'uniform-8', for example")
        return _uniform(n)
    if name_or_path not in presets():
        raise BadInput(
            f"no fleet is named {name_or_path!r}: {nearest(name_or_path, presets())} (uniform-N takes any N up to {MAX_WORKERS:,}), "
            "or the path of a .toml file"
        )
    return parse_fleet(tomllib.loads(_folder().joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")), gpus())


def _uniform(n: int) -> Fleet:
    base = parse_fleet(tomllib.loads(_folder().joinpath("uniform.toml").read_text(encoding="utf-8")), gpus())
    return replace(base, name=f"uniform-{n}", sites=(replace(base.sites[0], workers=n),))


def _from_file(path: Path) -> Fleet:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise BadInput(
            f"the fleet file {str(path)!r} cannot be read ({error}): give a TOML file, or one of {', '.join(presets())}"
        ) from None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets thousands deep
        raise BadInput(f"the fleet file {str(path)!r} is not TOML: {error}") from None
    data.setdefault("name", path.stem)
    try:
        return parse_fleet(data, gpus())
    except BadInput as error:
        raise BadInput(f"{path.name}: {error}") from None

"""Configuration files: read, override, check, print, compare.

    config = load(["base.toml", "site.toml"], sets=["plan.steps=10", "method.name=diloco"])

Later files and `sets` override earlier ones key by key. What is wrong is said in plain words, all of it at once, before anything is set up.
Relative paths inside a configuration are relative to the current directory.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gossamer.app.settings import Config, RunSection
from gossamer.app.settings.base import Section
from gossamer.app.wording import bounds, describe, nearest, show
from gossamer.core.errors import BadInput

__all__ = ["LOCAL", "Config", "config_hash", "dump", "load", "override", "parse", "plain", "shared", "value_of"]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
LOCAL = ("name", "log", "run.out", "run.threads_per_worker", "run.device", "run.offload")
"""What is no part of the result, and may differ between the workers of one run: the label, where numbers are shown, the folder, threads,
device, and where outer state is."""


def load(paths: Iterable[str | Path] = (), sets: Iterable[str] = ()) -> Config:
    """The configuration of TOML files, in order, then of `key.sub=value` settings.

    Raises:
        BadInput: no such file, not TOML, an unknown key, or a value that cannot be; every fault is named.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        _merge(merged, _read(Path(path)))
    for text in sets:
        key, value = _assignment(text)
        _merge(merged, _nested(key, value))
    return parse(merged)


def parse(data: Mapping[str, Any]) -> Config:
    """The configuration of nested tables, as TOML gives them.

    Raises:
        BadInput: an unknown key, or a value that cannot be; every fault is named.
    """
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        said = list(dict.fromkeys(_fault(dict(e)) for e in error.errors()))
        head = "the configuration has a fault: " if len(said) == 1 else f"the configuration has {len(said)} faults:\n  "
        raise BadInput(head + "\n  ".join(said)) from None


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with dotted keys set: `override(config, {"run.out": "runs/a"})`.

    Raises:
        BadInput: as for `load`.
    """
    data = plain(config)
    for key, value in values.items():
        _merge(data, _nested(key, value))
    return parse(data)


def dump(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that loads to an equal one.

    >>> load() == parse(tomllib.loads(dump(load())))
    True
    """
    return tomli_w.dumps(plain(config))


def config_hash(config: Config) -> int:
    """A 64-bit mark of everything that the workers of one run must agree on (`shared`).

    >>> config_hash(load()) == config_hash(load(sets=["run.device=cpu"])) != config_hash(load(sets=["seed=1"]))
    True
    """
    text = json.dumps(shared(config), sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shared(config: Config) -> dict[str, Any]:
    """What the workers of one run must agree on, as nested tables: all but LOCAL, and `wan`, which is compared elsewhere."""
    return plain(config, ("wan", *LOCAL))


def plain(config: Config, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Nested tables without the keys that are left out: where they are None, or by their dotted names."""
    data = config.model_dump(exclude_none=True)
    for key in leave_out:
        *tables, last = key.split(".")
        within = data
        for table in tables:
            within = within[table]
        within.pop(last, None)
    return data


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = nearest(path.name, there)
        raise BadInput(f"there is no file {path}" + (f"; did you mean {path.parent / near}?" if near else "")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a configuration file ({error}): give a TOML text file") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None


def _assignment(text: str) -> tuple[str, Any]:
    """`key.sub=value`."""
    key, sign, raw = (part.strip() for part in text.partition("="))
    if not sign or not _KEY.fullmatch(key):
        raise BadInput(f"--set {text}: expected key=value, such as --set plan.steps=10")
    return key, value_of(raw)


def value_of(raw: str) -> Any:
    """What is given on a command line: a TOML value, or else text without quotes.

    >>> [value_of(raw) for raw in ("3", '"3"', "gpu", "2026-01-01")]
    [3, '3', 'gpu', '2026-01-01']
    """
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits, or brackets thousands deep
        return raw
    value = parsed["value"]
    times = (datetime.date, datetime.time)  # a folder called 2026-01-01 is text
    return raw if len(parsed) > 1 or isinstance(value, times) else value


def _nested(key: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(base: dict[str, Any], over: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Sets the keys of `over` in `base`, table by table. The two ways to give the length of a run replace each other."""
    if path == ("run",):
        for key, other in (("rounds", "tokens"), ("tokens", "rounds")):
            if key in over and other not in over:
                base.pop(other, None)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value, (*path, key))
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def _sections(model: type[Section] = Config, within: str = "") -> dict[str, type[Section]]:
    """Every table by its dotted name, tables in tables too."""
    found: dict[str, type[Section]] = {}
    for key, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found[within + key] = kind
            found |= _sections(kind, f"{within}{key}.")
    return found


def _leaves() -> list[str]:
    """Every dotted key."""
    sections = _sections()
    top = [key for key in Config.model_fields if key not in sections]
    inside = [f"{name}.{key}" for name, section in sections.items() for key in section.model_fields]
    return top + [key for key in inside if key not in sections]


def _field(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The dotted key of a fault, and its field when there is one. Parts of a location that name a type of a union are left out."""
    keys: list[str] = []
    model: type[BaseModel] | None = Config
    field: FieldInfo | None = None
    for part in map(str, location):
        if model is None:
            break
        keys.append(part)
        field = model.model_fields.get(part)
        kind = field.annotation if field else None
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return ".".join(keys), field


def _fault(error: dict[str, Any]) -> str:
    """One validation error in plain words: key, value, expectation, remedy."""
    if isinstance(cause := error.get("ctx", {}).get("error"), BadInput):
        return str(cause)
    key, field = _field(error["loc"])
    value = error["input"]
    if error["type"] == "extra_forbidden":
        return _unknown(key)
    if field is None:
        return f"{key} = {show(value)}: expected a number, text, true or false, or a list of these or of such lists"
    if (section := _sections().get(key)) is not None:
        keys = ", ".join(section.model_fields)
        hint = f'; did you mean {key}.name = "{value}"?' if isinstance(value, str) and "name" in section.model_fields else ""
        return f"{key} = {show(value)}: {key} is a section with the keys {keys}{hint}"
    wanted = describe(field.annotation) + bounds(field.metadata)
    near = nearest(value, re.findall(r'"([^"]+)"', wanted)) if isinstance(value, str) and error["type"] == "literal_error" else None
    about = f" ({field.description})" if field.description else ""
    default = _default(key, field)
    return (
        f"{key} = {show(value)}: expected {wanted}{about}."
        + (f' Did you mean "{near}"?' if near else "")
        + (f" Leave it out for the default, {show(default)}." if default not in (None, "") else "")
    )


def _default(key: str, field: FieldInfo) -> Any:
    return RunSection().rounds if key == "run.rounds" else field.default


def _unknown(key: str) -> str:
    """An unknown key, with the nearest known one: in its section first, then anywhere by its last part."""
    head, _, last = key.rpartition(".")
    leaves = _leaves()
    inside = [known.rpartition(".")[2] for known in (*leaves, *_sections()) if known.rpartition(".")[0] == head]
    if near := nearest(last, inside):
        found: str | None = f"{head}.{near}" if head else near
    else:
        by_last = {leaf.rpartition(".")[2]: leaf for leaf in reversed(leaves)}
        close = nearest(last, by_last)
        found = by_last[close] if close else None
    known = f"; the keys of [{head}] are {', '.join(inside)}" if head and inside else f"; known here: {', '.join(inside)}"
    return f"unknown key {key}" + (f"; did you mean {found}?" if found else known)

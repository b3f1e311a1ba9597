"""In what the descriptions of one run differ, in words. Settings come from other sites: they are bounded, and printable ASCII."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field, StringConstraints

if TYPE_CHECKING:
    from gossamer.wan.roster.records import Spec

VALUE_CHARS, MAX_SETTINGS = 120, 512

_KEY = r"^[A-Za-z][A-Za-z0-9_.-]{0,79}$"
Key: TypeAlias = Annotated[str, StringConstraints(pattern=_KEY)]
Setting: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[ -~]{0,120}$")]
Settings: TypeAlias = Annotated[dict[Key, Setting], Field(max_length=MAX_SETTINGS)]

_NAMES = {"floor_s": "wan.deadline_s", "seats": "workers of the fleet", "synchronous": "synchronous method"}
_OF_SECTION = ("sites", "min_sites", "founders", "alone", "quorum", "late", "without", "lease_s", "spread")
_DERIVED = ("configuration", "layout", "seats", "synchronous")
"""Fields that follow from the settings: named where no setting explains them."""
_VERSIONS = {"corpus": "the text of data.source (hash)", "frozen": "the parameters of the model that are not trained (mark)"}
_CONTENTS = "contents."
_LISTED_CHARS = 520
_SHOWN_CHARS = 60


def settings_of(tables: Mapping[str, object], contents: Mapping[str, object]) -> dict[str, str]:
    """Nested tables as dotted keys and values in JSON, for comparison.

    Args:
        contents: what the tables only name (a fleet's file): of these there is a mark.
    """
    found = dict(_flat(tables)) | {_CONTENTS + key: _mark(repr(value)) for key, value in contents.items()}
    return dict(sorted((key, value) for key, value in found.items() if re.fullmatch(_KEY, key))[:MAX_SETTINGS])


def _flat(tables: Mapping[str, object], above: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{above}{key}.")
        else:
            text = json.dumps(value, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")
            found.append((above + str(key), text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 20]}... ({_mark(text)})"))
    return found


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def differences(ours: Spec, theirs: Spec) -> str:
    """In what two descriptions of one run differ; empty: in nothing.

    Args:
        ours: what the run has.
        theirs: what a site has that comes.
    """
    found = _settings(ours.settings, theirs.settings) if ours.configuration != theirs.configuration else []
    explained = bool(found)
    for name in type(ours).model_fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a == b or name in ("settings", "versions") or (explained and name in _DERIVED):
            continue
        found.append(_differs(_NAMES.get(name, f"wan.{name}" if name in _OF_SECTION else name), b, a))
    for key in sorted({*ours.versions, *theirs.versions}):
        if (a := ours.versions.get(key, "none")) != (b := theirs.versions.get(key, "none")):
            found.append(_differs(_VERSIONS.get(key, key), b, a))
    return _listed(found)


def named(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The settings that differ, with both values; empty: none does."""
    return _listed(_settings(ours, theirs))


def _settings(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    if not ours or not theirs:
        return []
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    plain = [key for key in keys if not key.startswith(_CONTENTS)]
    if plain:
        return [_differs(key, theirs.get(key, "left out"), ours.get(key, "left out")) for key in plain]
    return [_differs(f"what the {key.removeprefix(_CONTENTS)} is made of (mark)", theirs.get(key, "-"), ours.get(key, "-")) for key in keys]


def _differs(what: str, theirs: object, ours: object) -> str:
    return f"{what} = {_short(theirs)} (the run: {_short(ours)})"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _listed(found: list[str]) -> str:
    """As many as there is room for."""
    said: list[str] = []
    for one in found:
        if said and sum(map(len, said)) + len(one) > _LISTED_CHARS:
            break
        said.append(one)
    more = len(found) - len(said)
    return ", ".join(said) + (f", and {more} more" if more else "")

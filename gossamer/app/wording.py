"""Types, values and near misses in plain words, for the messages that people read.

>>> describe(int | None), describe(Literal["a", "b"])
('a whole number', 'one of "a", "b"')
>>> nearest("stesp", ["steps", "batch"])
'steps'
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}


def describe(annotation: Any) -> str:
    """What a value of this type is, as a person would say it. None in a union stands for leaving the key out and is not said."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(show(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(a) for a in args if a is not type(None)))
    if origin is tuple:
        inner = {describe(a) for a in args if a is not Ellipsis}
        count = "" if Ellipsis in args else f"{len(args)} values, "
        return f"a list ({count}each {' or '.join(sorted(inner))})"
    if origin is dict or annotation is dict:
        return "a table"
    if origin is list or annotation is list:
        return "a list"
    return f"a {getattr(annotation, '__name__', annotation)}"


def bounds(metadata: Iterable[Any]) -> str:
    """The limits among a field's metadata: `, at least 1 and below 2`, or nothing."""
    said = [
        f"{word} {getattr(m, attribute)}"
        for m in metadata
        for attribute, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if getattr(m, attribute, None) is not None
    ]
    return ", " + " and ".join(said) if said else ""


def show(value: Any) -> str:
    """A value as one writes it in TOML; long ones are cut."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like `word`, or None when nothing comes near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None

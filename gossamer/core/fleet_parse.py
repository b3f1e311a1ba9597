"""A fleet from plain dicts (a TOML file, read by somebody else).

    name = "mine"                       # optional keys of the fleet: source, message_ms, local, gpus, currency
    [gpus."My card"]                    # only for cards that Gossamer does not know
    tflops = 100.0                      # dense bf16
    memory_gb = 24
    [[sites]]
    name = "lab"
    region = "here"
    gpu = "My card"
    up_mbps = 100
    down_mbps = 500
    [[links]]
    between = ["here", "there"]         # both directions; or from = "here", to = "there" for one
    rate_mbps = 1000
    rtt_ms = 40                         # or latency_ms, one way

The other keys of a site and of a link are the fields of `gossamer.core.fleet.Site` and `gossamer.core.fleet.Link`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.core.fleet import LAN, Fleet, Gpu, Link, Site
from gossamer.core.trace import LARGEST, Trace

_FLEET = ("name", "source", "message_ms", "local", "gpus", "sites", "links", "currency")
_SITE_NUMBERS = ("up_mbps", "down_mbps", "mfu", "overhead_s", "speed", "memory_limit_gb", "price_gpu_h", "price_egress_gb")
_SITE = ("name", "region", "gpu", "workers", "ranks", *_SITE_NUMBERS, "step_s", "memory_gb", "trace")
_LINK = ("rate_mbps", "latency_ms", "rtt_ms", "jitter_ms", "loss", "window_bytes", "connections", "trace")


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as a clause for an error message, and all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(word.lower(), [w.lower() for w in words], n=1, cutoff=0.5)
    hint = next((w for w in words if close and w.lower() == close[0]), None)
    return (f"did you mean {hint!r}? " if hint is not None else "") + f"known: {', '.join(words)}"


def _keys(table: Any, known: Iterable[str], where: str, needed: Iterable[str] = ()) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise BadInput(f"{where} is {_said(table)}: expected a table")
    for key in table:
        if key not in known:
            raise BadInput(f"{where} has an unknown key {key!r}; {nearest(str(key), known)}")
    for key in needed:
        if key not in table:
            raise BadInput(f"{where} lacks {key!r}: add it")
    return table


def _said(value: Any) -> str:
    """A value as Python writes it; long ones are cut."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "far too long"
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{what} is {_said(value)}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise BadInput(f"{what} is {_said(value)}: expected a number of at most {LARGEST:g}") from None


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{what} is {_said(value)}: expected a whole number")
    if abs(value) > LARGEST:
        raise BadInput(f"{what} is {_said(value)}: expected a whole number of at most {LARGEST:g}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadInput(f"{what} is {_said(value)}: expected a text in quotes")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadInput(f"{what} is {_said(value)}: expected a list in square brackets")
    return list(value)


def _trace(table: Any, where: str) -> Trace:
    t = _keys(table, ("times_s", "factors"), where, needed=("times_s", "factors"))
    times, factors = (tuple(_number(v, f"{key} of {where}") for v in _list(t[key], f"{key} of {where}")) for key in ("times_s", "factors"))
    return Trace(times, factors)


def _gpu(name: str, table: Any) -> Gpu:
    where = f"GPU {name!r}"
    t = _keys(table, ("tflops", "memory_gb"), where, needed=("tflops", "memory_gb"))
    return Gpu(name, _number(t["tflops"], f"tflops of {where}"), _number(t["memory_gb"], f"memory_gb of {where}"))


def parse_gpus(data: Any) -> dict[str, Gpu]:
    """GPUs by name from {name: {"tflops", "memory_gb"}}."""
    if not isinstance(data, Mapping):
        raise BadInput(f"gpus is {_said(data)}: expected a table of GPUs by name")
    return {name: _gpu(name, table) for name, table in data.items()}


def _link(table: Mapping[str, Any], where: str) -> Link:
    if ("latency_ms" in table) == ("rtt_ms" in table):
        raise BadInput(f"{where} needs exactly one of latency_ms (one way) and rtt_ms (there and back)")
    numbers = {
        key: _number(table[key], f"{key} of {where}") for key in ("rate_mbps", "latency_ms", "rtt_ms", "jitter_ms", "loss") if key in table
    }
    if "rate_mbps" not in numbers:
        raise BadInput(f"{where} lacks 'rate_mbps': add it")
    try:
        return Link(
            rate_mbps=numbers["rate_mbps"],
            latency_ms=numbers["latency_ms"] if "latency_ms" in numbers else numbers["rtt_ms"] / 2,
            jitter_ms=numbers.get("jitter_ms", 0.0),
            loss=numbers.get("loss", 0.0),
            window_bytes=_integer(table["window_bytes"], f"window_bytes of {where}") if "window_bytes" in table else None,
            connections=_integer(table.get("connections", 1), f"connections of {where}"),
            trace=_trace(table["trace"], f"the trace of {where}") if "trace" in table else None,
        )
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _ends(table: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    directed = "from" in table or "to" in table
    if directed == ("between" in table) or (directed and not ("from" in table and "to" in table)):
        raise BadInput(f"{where} needs either between = [a, b] (both directions) or from = a and to = b (one direction)")
    if directed:
        return [(_text(table["from"], f"from of {where}"), _text(table["to"], f"to of {where}"))]
    ends = [_text(e, f"an end of {where}") for e in _list(table["between"], f"between of {where}")]
    if len(ends) != 2:
        raise BadInput(f"between of {where} is {_said(ends)}: expected two names")
    return list(dict.fromkeys([(ends[0], ends[1]), (ends[1], ends[0])]))


def _points(raw: Any, what: str, unit: str) -> tuple[tuple[int, float], ...]:
    points = []
    for point in _list(raw, what):
        pair = _list(point, f"a point of {what}")
        if len(pair) != 2:
            raise BadInput(f"a point of {what} is {_said(pair)}: expected [tokens of a step, {unit}]")
        points.append((_integer(pair[0], f"tokens in {what}"), _number(pair[1], f"{unit} in {what}")))
    return tuple(points)


def _site(table: Any, index: int, gpus: Mapping[str, Gpu]) -> Site:
    where = f"site number {index + 1}"
    if isinstance(table, Mapping) and isinstance(table.get("name"), str):
        where = f"site {table['name']!r}"
    t = _keys(table, _SITE, where, needed=("name", "region", "gpu", "up_mbps", "down_mbps"))
    card = _text(t["gpu"], f"gpu of {where}")
    if card not in gpus:
        raise BadInput(
            f"gpu of {where} is {card!r}, which is not known: add [gpus.{card!r}] with tflops and memory_gb; {nearest(card, gpus)}"
        )
    numbers = {key: _number(t[key], f"{key} of {where}") for key in _SITE_NUMBERS if key in t}
    return Site(
        name=_text(t["name"], f"name of {where}"),
        region=_text(t["region"], f"region of {where}"),
        gpu=gpus[card],
        up_mbps=numbers["up_mbps"],
        down_mbps=numbers["down_mbps"],
        workers=_integer(t.get("workers", 1), f"workers of {where}"),
        ranks=_integer(t.get("ranks", 1), f"ranks of {where}"),
        mfu=numbers.get("mfu", 0.4),
        overhead_s=numbers.get("overhead_s", 0.0),
        speed=numbers.get("speed", 1.0),
        step_s=_points(t.get("step_s", []), f"step_s of {where}", "seconds"),
        trace=_trace(t["trace"], f"the trace of {where}") if "trace" in t else None,
        memory_gb=_points(t.get("memory_gb", []), f"memory_gb of {where}", "GB"),
        memory_limit_gb=numbers.get("memory_limit_gb"),
        price_gpu_h=numbers.get("price_gpu_h"),
        price_egress_gb=numbers.get("price_egress_gb"),
    )


def parse_fleet(data: Mapping[str, Any], gpus: Mapping[str, Gpu]) -> Fleet:
    """The fleet that `data` describes; `gpus` are the cards known by name, and `data["gpus"]` may add to them.

    Raises:
        BadInput: an unknown key (the nearest is named), a missing one, a value of another kind or out of range, a missing link.
    """
    top = _keys(data, _FLEET, "the fleet", needed=("name", "sites"))
    cards = {**gpus, **parse_gpus(top.get("gpus", {}))}
    links: dict[tuple[str, str], Link] = {}
    for k, raw in enumerate(_list(top.get("links", []), "links of the fleet")):
        where = f"link number {k + 1}"
        table = _keys(raw, ("from", "to", "between", *_LINK), where)
        for pair in _ends(table, where):
            if pair in links:
                raise BadInput(f"{where} gives {pair[0]!r} -> {pair[1]!r} a second time: drop one")
            links[pair] = _link(table, f"the link {pair[0]!r} -> {pair[1]!r}")
    local = _keys(top["local"], _LINK, "local of the fleet") if "local" in top else None
    return Fleet(
        name=_text(top["name"], "name of the fleet"),
        sites=tuple(_site(table, k, cards) for k, table in enumerate(_list(top["sites"], "sites of the fleet"))),
        links=links,
        local=_link(local, "local of the fleet") if local is not None else LAN,
        message_s=1e-3 * _number(top.get("message_ms", 0.0), "message_ms of the fleet"),
        source=top.get("source", "") and _text(top["source"], "source of the fleet"),
        currency=_text(top.get("currency", "USD"), "currency of the fleet"),
    )

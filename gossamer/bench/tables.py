"""Markdown tables of a result file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.bench.published import GEOMESH

DASH = "—"
Content = Mapping[str, Any]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|:--|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where there is nothing, or a run never got there."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.mean(known) if known and len(known) == len(values) else None


def number(value: float | None, digits: int, unit: str = "") -> str:
    """With so many decimals; a dash for None."""
    return DASH if value is None else f"{value:.{digits}f}{unit}"


def share(value: float | None) -> str:
    """As a percentage."""
    return DASH if value is None else f"{100 * value:.1f} %"


def paired(a: Content, b: Content) -> tuple[float, float] | None:
    """Mean and standard error over the seeds of loss(a) - loss(b), in nats; None where they share fewer than two.

    >>> ours = {"seeds": [{"seed": 1, "loss": 3.0}, {"seed": 2, "loss": 3.2}]}
    >>> paired(ours, {"seeds": [{"seed": 1, "loss": 2.9}, {"seed": 2, "loss": 3.1}]})
    (0.1, 0.0)
    """
    theirs = {s["seed"]: s.get("loss") for s in b["seeds"]}
    gaps = [s["loss"] - theirs[s["seed"]] for s in a["seeds"] if s.get("loss") is not None and theirs.get(s["seed"]) is not None]
    if len(gaps) < 2:
        return None
    return round(statistics.mean(gaps), 6), round(statistics.stdev(gaps) / math.sqrt(len(gaps)), 6)


def verdict(a: Content, b: Content) -> str:
    """The difference in nats with its standard error; "not distinguishable" within two of them."""
    found = paired(a, b)
    if found is None:
        return DASH
    gap, error = found
    said = f"{gap:+.3f} ± {error:.3f}"
    return said if abs(gap) > 2 * error else f"{said}, not distinguishable"


def column(row: Content, key: str) -> list[float | None]:
    """A number of each seed."""
    return [s.get(key) for s in row["seeds"]]


def _minutes(row: Content, key: str) -> float | None:
    seconds = mean(column(row, key))
    return None if seconds is None else seconds / 60


def _fastest(row: Content) -> float | None:
    return mean([s["straggler_idle"][0] if "straggler_idle" in s else None for s in row["seeds"]])


def line(row: Content, against: Content | None) -> list[str]:
    """One row: minutes to the target, total minutes, loss, perplexity, verdict, idle, MB, utilisation."""
    loss = mean(column(row, "loss"))
    failed = next((s["failed"] for s in row["seeds"] if "failed" in s), None)
    return [
        row["title"] + (" (failed)" if failed else ""),
        number(_minutes(row, "to_target_s"), 2),
        number(_minutes(row, "total_s"), 2),
        number(loss, 3),
        number(None if loss is None else math.exp(loss), 1),
        verdict(row, against) if against is not None and against is not row else DASH,
        share(_fastest(row)),
        share(mean(column(row, "network_idle"))),
        number(mean(column(row, "mb_per_round")), 1),
        share(mean(column(row, "utilisation"))),
    ]


HEAD = (
    "method",
    "min to target",
    "total min",
    "loss, nats",
    "perplexity",
    "against {}",
    "straggler idle, H100",
    "network idle",
    "MB a round",
    "utilisation",
)


def floor_line(found: Content) -> list[str]:
    """Perfect balance and no exchange, with DiLoCo's learning per token."""
    to_target_s = mean(found["floor"]["to_target_s"])
    minutes = number(None if to_target_s is None else to_target_s / 60, 2), number(found["floor"]["total_s"] / 60, 2)
    return ["floor: perfect balance, no exchange, DiLoCo's learning", *minutes, DASH, DASH, DASH, "0", "0", "0", "100 %"]


def main_table(found: Content) -> str:
    """Every tuned row, and the floor."""
    diloco = found["rows"]["diloco"]
    body = [line(row, diloco) for row in found["rows"].values()]
    body.append(floor_line(found))
    return markdown([h.format("DiLoCo") for h in HEAD], body)


HEADLINE = ("ddp", "diloco", "halos", "awb", "css", "geomesh", "adamw", "adamw_overlap", "adamw_replan", "muon")


def headline_table(found: Content) -> str:
    """The rows that a newcomer wants to see."""
    rows = found["rows"]
    chosen = [0, 1, 3, 5, 6, 7, 8, 9]
    body = [[cells[k] for k in chosen] for cells in (line(rows[key], rows["diloco"]) for key in HEADLINE if key in rows)]
    body.append([floor_line(found)[k] for k in chosen])
    return markdown([HEAD[k].format("DiLoCo") for k in chosen], body)


def variants_table(found: Content) -> str:
    """One option changed, against the row that it was changed from."""
    body = [line(row, found["rows"][row["like"]]) for row in found["variants"].values()]
    return markdown([h.format("its own row") for h in HEAD], body)


def slowed_table(found: Content) -> str:
    """Under a slow-down, against the first row of the table."""
    table = list(found["slowed"].values())
    return markdown([h.format("the first row") for h in HEAD], [line(row, table[0]) for row in table])


def second_table(found: Content) -> str:
    """The headline rows at the second size."""
    table = found["second"]["rows"]
    return markdown([h.format("DiLoCo") for h in HEAD], [line(row, table["diloco"]) for row in table.values()])


def tuned_in_words(best: Content) -> str:
    """Tuned values by the last part of their names."""
    return ", ".join(f"{k.partition('.')[2]} {v:g}" if isinstance(v, float | int) else f"{k} {v}" for k, v in best.items())


def tuning_table(found: Content) -> str:
    """What each search ended with."""
    body = []
    for key, f in found["tuning"].items():
        body.append(
            [
                found["rows"][key]["title"],
                tuned_in_words(f["best"]),
                str(f["trials"]),
                number(f["loss"], 3),
                ", ".join(f["edges"]) or "none",
                ", ".join(f["open"]) or "none",
            ]
        )
    return markdown(("method", "best", "trials", "score", "at an edge", "neighbour untried"), body)


def wire_table(found: Content) -> str:
    """Bytes and seconds of an exchange by route and number of workers."""
    body = []
    for n in sorted({w["workers"] for w in found["wire"]}):
        of = {w["route"]: w for w in found["wire"] if w["workers"] == n}
        ring = of["ring, fp32"]
        for route, w in of.items():
            body.append([f"{n}, {route}", f"{w['bytes'] / 1e6:.2f}", f"{ring['bytes'] / w['bytes']:.2f}", f"{w['exchange_s']:.2f}"])
    return markdown(("workers, route", "MB sent by a worker", "times less than the ring", "seconds"), body)


def published_table(found: Content) -> str:
    """Ours as ratios beside the published ones."""
    ours, diloco = found["rows"], found["rows"]["diloco"]
    base = mean(column(diloco, "to_target_s"))
    whole = mean(column(diloco, "total_s"))
    body = []
    for key, p in GEOMESH.items():
        row = ours.get(key) or found["variants"].get(key)
        if row is None:
            continue
        mine, total = mean(column(row, "to_target_s")), mean(column(row, "total_s"))
        loss, theirs = mean(column(row, "loss")), mean(column(diloco, "loss"))
        body.append(
            [
                row["title"],
                DASH if p.to_target_h is None else f"{p.to_target_h / 3.7:.2f}",
                DASH if mine is None or base is None else f"{mine / base:.2f}",
                DASH if p.total_h is None else f"{p.total_h / 12.0:.2f}",
                DASH if total is None or whole is None else f"{total / whole:.2f}",
                f"{math.log(p.perplexity / 23.0):+.3f}",
                DASH if loss is None or theirs is None else f"{loss - theirs:+.3f}",
                p.straggler_idle,
                share(_fastest(row)),
                share(p.network_idle),
                share(mean(column(row, "network_idle"))),
            ]
        )
    head = (
        "method",
        "time to target, of DiLoCo's: published",
        "ours",
        "training time, of DiLoCo's: published",
        "ours",
        "nats over DiLoCo: published",
        "ours",
        "straggler idle: published",
        "ours",
        "network idle: published",
        "ours",
    )
    return markdown(head, body)


TABLES = {
    "headline": headline_table,
    "main": main_table,
    "published": published_table,
    "variants": variants_table,
    "slowed": slowed_table,
    "second": second_table,
    "tuning": tuning_table,
    "wire": wire_table,
}


def fill(text: str, found: Content, tables: Mapping[str, Callable[[Content], str]] = TABLES) -> str:
    """`text` with what stands between `<!-- table: NAME -->` and `<!-- end -->` replaced by that table."""
    for name, make in tables.items():
        begin = f"<!-- table: {name} -->\n"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition("<!-- end -->")
            text = f"{before}{begin}{make(found)}\n<!-- end -->{after}"
    return text

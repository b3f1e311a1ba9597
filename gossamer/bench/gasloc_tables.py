"""Markdown tables of the result file of `gossamer bench gasloc`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from gossamer.bench.curve import Curve, time_to
from gossamer.bench.gasloc_rows import FLEETS, T1B, TOPOLOGIES, WIDE
from gossamer.bench.published import DDP_ONCE, DDP_ONCE_SECOND, GASLOC_MANY, GASLOC_ONCE, GASLOC_ONCE_SECOND, Pair
from gossamer.bench.tables import DASH, Content, column, markdown, mean, number, tuned_in_words, verdict


def _loss(row: Content) -> str:
    """Mean over the seeds, their standard deviation, and how many there are; of one, its loss."""
    values = [v for v in column(row, "loss") if v is not None]
    if not values or len(values) < len(row["seeds"]):
        return "diverged" if not values else f"{statistics.mean(values):.3f}, {len(row['seeds']) - len(values)} diverged"
    said = f"{statistics.mean(values):.3f}"
    return f"{said} (sd {statistics.stdev(values):.3f}, {len(values)})" if len(values) > 1 else said


def _once(table: Content, published: Mapping[str, Pair], ddp: float) -> str:
    """GASLoC and DAdam at one inner step a round, side by side."""
    body = []
    for name in TOPOLOGIES:
        gasloc, dadam = table[f"gasloc_{name}_h1"], table[f"dadam_{name}"]
        theirs = published[name]
        gap = None if theirs.gasloc is None or theirs.dadam is None else theirs.gasloc - theirs.dadam
        body.append(
            [name, _loss(gasloc), _loss(dadam), _gap(gasloc, dadam), number(theirs.gasloc, 2), number(theirs.dadam, 2), number(gap, 2)]
        )
    body.append(["DDP", _loss(table["ddp"]), DASH, DASH, f"{ddp:.2f}", DASH, DASH])
    return markdown(("", "GASLoC", "DAdam", "GASLoC - DAdam", "published GASLoC", "DAdam", "difference"), body)


def _gap(a: Content, b: Content) -> str:
    """The paired difference; of one seed alone, without a spread."""
    if len(a["seeds"]) > 1:
        return verdict(a, b)
    mine, theirs = mean(column(a, "loss")), mean(column(b, "loss"))
    return DASH if mine is None or theirs is None else f"{mine - theirs:+.3f}, one seed"


def once_table(found: Content) -> str:
    """T1a."""
    return _once(found["tables"]["once"], GASLOC_ONCE, DDP_ONCE)


def second_table(found: Content) -> str:
    """T2."""
    return _once(found["tables"]["second"], GASLOC_ONCE_SECOND, DDP_ONCE_SECOND)


def many_table(found: Content) -> str:
    """T1b: 30 inner steps a round, 8, 16 and 32 workers, against DiLoCo of as many."""
    by_n = {8: found["tables"]["many"], **{n: found["wide"][str(n)] for n in WIDE}}
    body = []
    for row in T1B:
        line = [row.title]
        for table in by_n.values():
            mine = table.get(row.key)
            line += [DASH, DASH] if mine is None else [_loss(mine), DASH if row.key == "diloco" else _gap(mine, table["diloco"])]
        for k in (0, 1):
            theirs, base = GASLOC_MANY.get(row.key), GASLOC_MANY["diloco"]
            line.append(DASH if theirs is None else f"{theirs[k] - base[k]:+.2f}")
        body.append(line)
    head = [text for n in by_n for text in (f"n = {n}", "- DiLoCo")]
    return markdown(("", *head, "published - DiLoCo, n = 8", "n = 16"), body)


def forms_table(found: Content) -> str:
    """The three forms of momentum, two_peer, against the default."""
    plain = found["tables"]["many"]["gasloc_two_peer"]
    body = [["outer (the default)", _loss(plain), DASH, tuned_in_words(plain["tuned"])]]
    body += [[row["title"], _loss(row), _gap(row, plain), tuned_in_words(row["tuned"])] for row in found["tables"]["forms"].values()]
    return markdown(("form", "loss, nats", "against outer", "tuned"), body)


def outer_table(found: Content) -> str:
    """Outer SGD, heavy ball and Nesterov."""
    body = []
    for name in ("two_peer", "complete"):
        nesterov = found["tables"]["many"][f"gasloc_{name}"]
        for row in (found["tables"]["outer"][f"{name}_sgd"], found["tables"]["outer"][f"{name}_heavy_ball"]):
            body.append([row["title"], _loss(row), _gap(row, nesterov), tuned_in_words(row["tuned"])])
        body.append([f"{name}, Nesterov", _loss(nesterov), DASH, tuned_in_words(nesterov["tuned"])])
    return markdown(("outer optimizer", "loss, nats", "against Nesterov", "tuned"), body)


def steps_table(found: Content) -> str:
    """Loss by inner steps a round."""
    each = {key: {point["steps"]: point["loss"] for point in points} for key, points in found["steps"].items()}
    titles = {row.key: row.title for row in T1B}
    body = [[titles[key], *(number(losses[steps], 3) for steps in sorted(losses))] for key, losses in each.items()]
    return markdown(("loss, nats", *(f"H = {steps}" for steps in sorted(next(iter(each.values()))))), body)


def surface_table(found: Content) -> str:
    """Loss over outer learning rate and momentum."""
    body = []
    for key, points in found["surface"].items():
        for momentum in sorted({p["outer_momentum"] for p in points}):
            of = {p["outer_lr"]: p["loss"] for p in points if p["outer_momentum"] == momentum}
            body.append([f"{key.removeprefix('gasloc_')}, momentum {momentum:g}", *(number(of[lr], 3) for lr in sorted(of))])
    rates = sorted({p["outer_lr"] for points in found["surface"].values() for p in points})
    return markdown(("", *(f"outer lr {lr:g}" for lr in rates)), body)


def time_table(found: Content) -> str:
    """Time to DiLoCo's final loss, and of the whole run, of DiLoCo's."""
    lines: dict[str, list[str]] = {}
    for share in FLEETS:
        table = found["time"][share]
        diloco = table["diloco_wan"]
        target, whole_s = mean(column(diloco, "loss")), mean(column(diloco, "total_s"))
        for key, row in table.items():
            times = [None if target is None or "curve" not in s else time_to(Curve(*map(tuple, s["curve"])), target) for s in row["seeds"]]
            to_target_s, total_s = mean(times), mean(column(row, "total_s"))
            cells = [
                ratio(to_target_s, whole_s),
                ratio(total_s, whole_s),
                _loss(row),
                number(mean(column(row, "utilisation")), 2),
                ratio(row["model_s"], diloco["model_s"]),
            ]
            lines.setdefault(key, [row["title"]]).extend(cells)
    part = ("time to DiLoCo's loss", "whole run", "loss", "utilisation", "the paper's T_step")
    return markdown(("", *(f"{share} %: {text}" for share in FLEETS for text in part)), list(lines.values()))


def ratio(a: float | None, b: float | None) -> str:
    """a / b with two decimals."""
    return DASH if a is None or b is None or b == 0 else f"{a / b:.2f}"


def ours_table(found: Content) -> str:
    """What no paper has, against plain two_peer."""
    plain = found["tables"]["ours"]["plain"]
    body = []
    for row in found["tables"]["ours"].values():
        sent, base = mean(column(row, "mb_sent")), mean(column(plain, "mb_sent"))
        fewer = DASH if sent is None or base is None else f"{base / sent:.1f}"
        took = ratio(mean(column(row, "total_s")), mean(column(plain, "total_s")))
        body.append(
            [row["title"], _loss(row), DASH if row is plain else _gap(row, plain), fewer, took, number(mean(column(row, "utilisation")), 2)]
        )
    return markdown(("two_peer, H = 30", "loss, nats", "against plain", "times fewer bytes", "time, of plain's", "utilisation"), body)


def tuning_table(found: Content) -> str:
    """What each search ended with."""
    body = [
        [
            f["title"],
            tuned_in_words(f["best"]),
            str(f["trials"]),
            number(f["loss"], 3),
            ", ".join(f["edges"]) or "none",
            ", ".join(f["open"]) or "none",
        ]
        for f in found["tuning"].values()
    ]
    return markdown(("method", "best", "trials", "loss", "at an edge", "neighbour untried"), body)


TABLES: Mapping[str, Callable[[Content], str]] = {
    "gossip-once": once_table,
    "gossip-second": second_table,
    "gossip-many": many_table,
    "gossip-forms": forms_table,
    "gossip-outer": outer_table,
    "gossip-steps": steps_table,
    "gossip-surface": surface_table,
    "gossip-time": time_table,
    "gossip-ours": ours_table,
    "gossip-tuning": tuning_table,
}

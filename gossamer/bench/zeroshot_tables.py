"""The table of `gossamer bench zeroshot`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gossamer.app.zeroshot.evaluation import percent
from gossamer.app.zeroshot.harness import against_chance
from gossamer.bench.published import ZEROSHOT
from gossamer.bench.tables import DASH, Content, column, markdown, mean, number
from gossamer.bench.zeroshot import answers, gap, spread


def verdict(row: Content, against: Content, tasks: Content) -> str:
    """The difference of the mean accuracies in points, with its standard error; "not distinguishable" within two of them, or where both
    rows are at chance."""
    found = gap(row, against, list(tasks))
    if found is None:
        return DASH
    difference, error = found
    said = f"{100 * difference:+.1f} ± {100 * error:.1f}"
    if all(at_chance(one, tasks) for one in (row, against)):
        return f"{said}, both at chance: not distinguishable"
    return said if abs(difference) > 2 * error else f"{said}, not distinguishable"


def at_chance(row: Content, tasks: Content) -> bool:
    """Whether the mean accuracy is within two standard errors of guessing."""
    accuracy, error = spread([answers(row, task) for task in tasks])
    return against_chance(accuracy, error, sum(t["chance"] for t in tasks.values()) / len(tasks)) == "at chance"


def accuracy_table(found: Content) -> str:
    """Every row: accuracy by task, their mean, the difference to DiLoCo, the held-out loss, and what was published."""
    tasks, diloco = found["tasks"], found["rows"]["diloco"]
    head = ["method", *(f"{t['title']}, %" for t in tasks.values()), "mean, %", "against DiLoCo", "loss, nats", "published mean, %"]
    body = []
    for key, row in found["rows"].items():
        published = ZEROSHOT.get(key)
        last = [number(mean(column(row, "loss")), 3), DASH if published is None else f"{published:.2f}"]
        if not any("tasks" in s for s in row["seeds"]):
            body.append([f"{row['title']} (failed)", *[DASH] * (len(tasks) + 2), *last])
            continue
        each = [percent(*spread([answers(row, task)])) for task in tasks]
        against = DASH if row is diloco else verdict(row, diloco, tasks)
        body.append([row["title"], *each, percent(*spread([answers(row, task) for task in tasks])), against, *last])
    chance = [f"{100 * t['chance']:.1f}" for t in tasks.values()]
    overall = f"{100 * sum(t['chance'] for t in tasks.values()) / len(tasks):.1f}" if tasks else DASH
    body.append(["a guess", *chance, overall, DASH, DASH, DASH])
    return markdown(head, body)


TABLES: Mapping[str, Callable[[Content], str]] = {"zeroshot": accuracy_table}

"""One line per run, as plain text, Markdown and HTML. The numbers are the summaries' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean, stdev

from gossamer.report.read import Run
from gossamer.report.words import Recipe, alarms, charged, clock, fixed, labels, megabytes, percent, plain_label, recipe, tidy, with_method


@dataclass(frozen=True)
class Row:
    """One run of a comparison. Fractions are of wall time; None: not known, or not reached."""

    method: str
    world: str
    final_perplexity: float | None
    final_loss: float | None
    """Nats per token."""
    time_to_target_s: float | None
    wall_s: float | None
    straggler_idle: float | None
    network_idle: float | None
    utilisation: float | None
    sent_bytes: float
    """Mean over the workers."""
    rounds: int
    tokens: int

    def cells(self) -> tuple[str, ...]:
        """The row as printed, in the order of COLUMNS."""
        return (
            self.method,
            self.world,
            fixed(self.final_perplexity, 2),
            fixed(self.final_loss, 4),
            clock(self.time_to_target_s),
            clock(self.wall_s),
            percent(self.straggler_idle),
            percent(self.network_idle),
            percent(self.utilisation),
            megabytes(self.sent_bytes),
            f"{self.rounds:,}",
            f"{self.tokens:,}",
        )


COLUMNS = (
    ("method", ""),
    ("world", ""),
    ("final perplexity", ""),
    ("final loss", "nats/token"),
    ("time to target", "h:mm:ss"),
    ("total time", "h:mm:ss"),
    ("straggler idle", "%"),
    ("network idle", "%"),
    ("utilisation", "%"),
    ("sent per worker", "MB"),
    ("rounds", ""),
    ("tokens", ""),
)
"""Title and unit of each column; the first two are words, the others numbers."""
WORDS = 2


def comparison(runs: Sequence[Run]) -> tuple[Row, ...]:
    """The rows of a comparison, in the order given."""

    def share(run: Run, key: str) -> float | None:
        found = run.share(key)
        return None if found is None else found.mean

    return tuple(
        Row(
            method=with_method(label, run),
            world=tidy(run.summary["world"], 20),
            final_perplexity=run.number("final_perplexity"),
            final_loss=run.number("final_loss"),
            time_to_target_s=run.number("time_to_target_s"),
            wall_s=run.number("wall_s"),
            straggler_idle=share(run, "straggler_idle"),
            network_idle=share(run, "network_idle"),
            utilisation=share(run, "utilisation"),
            sent_bytes=sum(run.bytes_sent) / max(1, len(run.bytes_sent)),
            rounds=int(run.summary["rounds"]),
            tokens=int(run.summary["tokens"]),
        )
        for label, run in zip(labels(runs), runs, strict=True)
    )


def title(runs: Sequence[Run]) -> str:
    """What the table is about: targets, and whose clock was charged when it was not the trained model's own."""
    targets = sorted({t for run in runs if (t := run.number("target_perplexity")) is not None})
    goal = f"; target: perplexity {' / '.join(f'{t:g}' for t in targets)}" if targets else ""
    extra = charged(runs)
    return f"{len(runs)} run{'s' * (len(runs) != 1)}{goal}" + (f"; {extra}" if extra else "")


def as_text(runs: Sequence[Run], width: int | None = None) -> str:
    """The table for a terminal: a line for each run, or, where that is wider than `width` characters, a column for each run. Where that
    is too wide as well, tables below each other."""
    return "\n".join([title(runs), "", *laid_out(COLUMNS, [row.cells() for row in comparison(runs)], WORDS, width), *_after(runs, "")])


def laid_out(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], words: int, width: int | None = None) -> list[str]:
    """Lines of plain text: a line for each row; where that is wider than `width`, a column for each row, if that is narrow enough;
    else tables below each other, each with the first column.

    Args:
        columns: name and unit of each.
        words: so many columns, the first ones, are words; the others are numbers, and stand to the right.
    """
    wide = _aligned([[name for name, _ in columns], [unit for _, unit in columns], *rows], words=words, heads=2)
    if width is None or max(map(len, wide)) <= width:
        return wide
    names = [f"{name} ({unit})" if unit else name for name, unit in columns]
    tall = _aligned(list(zip(names, *rows, strict=True)), words=1, heads=1)
    return tall if max(map(len, tall)) <= width else _folded(columns, rows, words, width)


def _folded(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], words: int, width: int) -> list[str]:
    """Tables below each other, each with the first column and as many others as there is room for."""
    lines = [[name for name, _ in columns], [unit for _, unit in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    blocks: list[list[int]] = [[]]
    for i in range(1, len(columns)):
        if blocks[-1] and widths[0] + sum(widths[k] + 2 for k in (*blocks[-1], i)) > width:
            blocks.append([])
        blocks[-1].append(i)
    out: list[str] = []
    for block in blocks:
        kept = [[line[0], *(line[i] for i in block)] for line in lines]
        out += [""] * bool(out) + _aligned(kept, words=1 + sum(i < words for i in block), heads=2)
    return out


def _aligned(lines: Sequence[Sequence[str]], words: int, heads: int) -> list[str]:
    """Columns side by side, the first `words` of them to the left, the others to the right, with a rule below the first `heads` lines."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def put(line: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()

    body = [put(line) for line in lines]
    rule = "─" * (sum(widths) + 2 * len(widths) - 2)
    return [*body[:heads], rule, *body[heads:]]


def _after(runs: Sequence[Run], bullet: str) -> list[str]:
    """Alarms and paired comparisons below a table, after an empty line; nothing when there are none."""
    said = [*alarms(runs), *verdicts(runs)]
    return ["", *(bullet + line for line in said)] if said else []


def _heads() -> list[str]:
    return [f"{name} ({unit})" if unit else name for name, unit in COLUMNS]


def as_markdown(runs: Sequence[Run]) -> str:
    """The table in Markdown; a bar or angle bracket in a name is escaped."""

    def put(cells: Sequence[str]) -> str:
        return "| " + " | ".join(escape(c, quote=False).replace("\\", "\\\\").replace("|", "\\|") for c in cells) + " |"

    rule = "|" + "|".join(":--" if i < WORDS else "--:" for i in range(len(COLUMNS))) + "|"
    return "\n".join(
        [escape(title(runs), quote=False), "", put(_heads()), rule, *(put(row.cells()) for row in comparison(runs)), *_after(runs, "- ")]
    )


def as_html(runs: Sequence[Run], colors: Sequence[str] = ()) -> str:
    """The table in HTML; `colors` (one per run) puts the run's colour of the figures before its name."""
    heads = "".join(
        f'<th scope="col"{"" if i < WORDS else " class=num"}>{escape(name)}{f" <small>({escape(unit)})</small>" if unit else ""}</th>'
        for i, (name, unit) in enumerate(COLUMNS)
    )
    body = []
    for i, row in enumerate(comparison(runs)):
        first, *rest = row.cells()
        dot = f'<i class="dot" style="background:{escape(colors[i])}"></i>' if i < len(colors) else ""
        cells = "".join(f"<td{'' if j + 1 < WORDS else ' class=num'}>{escape(c)}</td>" for j, c in enumerate(rest))
        whole = ' class="whole"' if len(first) <= 24 else ""
        body.append(f'<tr><th scope="row"{whole}>{dot}{escape(first)}</th>{cells}</tr>')
    caption = f"<caption>{escape(title(runs))}</caption>"
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Each recipe against the one of lowest mean final loss, by paired seeds; empty unless two recipes share two seeds or more.

    With d the differences of final loss at equal seeds: mean(d) ± sd(d). A mean within one sample standard deviation of zero is inside
    the spread and "not distinguishable".
    """
    groups: dict[Recipe, dict[str, float]] = {}
    first: dict[Recipe, int] = {}
    for index, run in enumerate(runs):
        loss = run.number("final_loss")
        if loss is not None:
            groups.setdefault(recipe(run), {})[str(run.summary.get("seed"))] = loss
            first.setdefault(recipe(run), index)
    plain = {key: plain_label(runs[index]) for key, index in first.items()}
    alone = Counter(plain.values())
    names = {key: name if alone[name] == 1 else labels(runs)[first[key]] for key, name in plain.items()}
    groups = {key: losses for key, losses in groups.items() if len(losses) > 1}
    if len(groups) < 2:
        return []
    best = min(groups, key=lambda key: mean(groups[key].values()))
    out = []
    for key, losses in groups.items():
        found = paired(losses, groups[best])
        if key == best or found is None:
            continue
        middle, spread, seeds = found
        said = verdict(*found)
        out.append(f"{names[key]} minus {names[best]}: {middle:+.4f} ± {spread:.4f} nats per token over {seeds} seeds, {said}.")
    return out


def paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[float, float, int] | None:
    """Final losses by seed, compared: mean and sample standard deviation of the differences at equal seeds, and how many seeds these are.
    None where there are fewer than two.

    >>> paired({"0": 2.0, "1": 3.0, "7": 9.0}, {"0": 1.0, "1": 2.0})
    (1.0, 0.0, 2)
    """
    shared = sorted(set(ours) & set(theirs))
    if len(shared) < 2:
        return None
    differences = [ours[seed] - theirs[seed] for seed in shared]
    return mean(differences), stdev(differences), len(shared)


def verdict(middle: float, spread: float, seeds: int) -> str:
    """Of `paired`: a mean within one sample standard deviation of zero is inside the spread.

    >>> verdict(0.01, 0.02, 3), verdict(-0.5, 0.1, 3)
    ('not distinguishable', 'lower in these pairs')
    """
    if seeds < 2 or abs(middle) <= spread:
        return "not distinguishable"
    return "higher in these pairs" if middle > 0 else "lower in these pairs"

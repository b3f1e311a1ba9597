"""One self-contained HTML page per run or comparison: nothing comes from elsewhere. Without its script it lacks the zoom alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gossamer.core.errors import BadInput
from gossamer.report import figures
from gossamer.report.away import LEFT_OUT, time_left_out, tokens_left_out
from gossamer.report.consensus import single_workers
from gossamer.report.curves import styles
from gossamer.report.dark import themed, variables
from gossamer.report.read import Run
from gossamer.report.style import Chart
from gossamer.report.table import as_html, verdicts
from gossamer.report.words import (
    DASH,
    alarms,
    caution,
    charged,
    clock,
    comparison_sentence,
    fixed,
    flat,
    fleet_name,
    goes_on,
    labels,
    listed,
    megabytes,
    percent,
    plain_label,
    sentence,
    short,
    tidy,
    with_method,
    worker_names,
)
from gossamer.report.write import write_whole

HASH_CHARS = 12


@dataclass(frozen=True)
class Tile:
    """A number that deserves large type."""

    name: str
    value: str
    unit: str = ""


@dataclass(frozen=True)
class Setting:
    """A line of the configuration: one value per run."""

    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs disagree."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Seat:
    """One worker's line."""

    name: str
    utilisation: str
    straggler_idle: str
    network_idle: str
    sent: str
    received: str
    loss: str
    """Of its own final parameters."""
    digest: str


@dataclass(frozen=True)
class Plan:
    """A plan that replaced another while the run went."""

    rounds: str
    steps: str
    batch: str
    gain: str


@dataclass(frozen=True)
class Shown:
    """A chart in its place on the page."""

    key: str
    chart: Chart
    html: str
    """The picture or table, with variables for its colours."""


@dataclass(frozen=True)
class Card:
    """What the page shows of one run apart from the others."""

    label: str
    color: str
    sentence: str
    parts: tuple[tuple[str, tuple[Shown, ...]], ...]
    """Headings, and the charts below each."""
    seats: tuple[Seat, ...]
    equal: str
    """Whether the workers' parameters agree, in words, and how good each is by itself."""
    plans: tuple[Plan, ...]
    files: tuple[tuple[str, str], ...]
    torn: tuple[str, ...]


def settings(runs: Sequence[Run]) -> tuple[Setting, ...]:
    """The runs' configurations side by side; a dash where a run lacks the key."""
    configs = [flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    return tuple(Setting(key, tuple(config.get(key, DASH) for config in configs)) for key in keys)


def seats(run: Run) -> tuple[Seat, ...]:
    """A line per worker: shares of its time, bytes, and the digest of its final parameters."""
    shares = [run.share(key) for key in ("utilisation", "straggler_idle", "network_idle")]
    digests = run.summary.get("params_sha256") or []

    own = run.single

    def part(index: int, worker: int) -> str:
        share = shares[index]
        return percent(share.workers[worker]) if share and worker < len(share.workers) else DASH

    def volume(values: Sequence[int], worker: int) -> str:
        return megabytes(values[worker]) if worker < len(values) else DASH

    return tuple(
        Seat(
            name,
            part(0, i),
            part(1, i),
            part(2, i),
            volume(run.bytes_sent, i),
            volume(run.bytes_received, i),
            fixed(own.workers[i], 4) if own and i < len(own.workers) else "",
            tidy(digests[i], HASH_CHARS + 1)[:HASH_CHARS] if i < len(digests) and digests[i] else DASH,
        )
        for i, name in enumerate(worker_names(run))
    )


def tiles(run: Run) -> tuple[Tile, ...]:
    """The headline numbers of one run."""

    def mean(key: str) -> str:
        share = run.share(key)
        return percent(share.mean) if share else DASH

    own, final = run.single, "final " if run.finished else ""
    target, reached, rounds = run.number("target_perplexity"), run.number("time_to_target_s"), int(run.summary["rounds"])
    lost = f", {LEFT_OUT}" if tokens_left_out(run) else ""
    found = [
        Tile(f"{final}perplexity", fixed(run.number("final_perplexity"), 2)),
        Tile(f"{final}loss", fixed(run.number("final_loss"), 4), "nats per token"),
        *([Tile("single workers", f"{own.best:.3f}–{own.worst:.3f}", "best and worst, nats per token")] if own else []),
        Tile("total time", clock(run.number("wall_s")), "h:mm:ss" + (f", {LEFT_OUT}" if time_left_out(run) else "")),
    ]
    if target is not None:
        found.append(
            Tile(
                f"time to perplexity {target:g}",
                clock(reached) if reached is not None else "not reached",
                "h:mm:ss" if reached is not None else "",
            )
        )
    found += [
        Tile("utilisation", mean("utilisation"), "% of time in compute"),
        Tile("straggler idle", mean("straggler_idle"), "% of time"),
        Tile("network idle", mean("network_idle"), "% of time"),
        Tile("sent", megabytes(sum(run.bytes_sent) / max(1, len(run.bytes_sent))), "MB per worker"),
        Tile("tokens", short(float(run.summary["tokens"])), f"in {rounds:,} round{'s' * (rounds != 1)}{lost}"),
    ]
    return tuple(found)


def facts(run: Run) -> str:
    """What was run, in half a line."""
    seed = run.summary.get("seed")
    parameters = run.number("parameters")
    parts = [
        f"world {tidy(run.summary['world'], 20)}",
        f"{run.workers} worker{'s' * (run.workers != 1)}",
        f"{short(parameters)} parameters" if parameters is not None else "",
        f"seed {tidy(seed, 20)}" if seed is not None else "",
        f"consensus distance {consensus:.3g}" if (consensus := run.number("consensus_distance")) is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _equal(run: Run) -> str:
    digests = [d for d in run.summary.get("params_sha256") or [] if d]
    if len(digests) < 2:
        return ""
    kinds = len(set(digests))
    if kinds == 1:
        return "All workers ended with the same parameters, bit for bit."
    return f"The workers ended with {kinds} different sets of parameters. {single_workers(run)}".strip()


def plans(run: Run) -> tuple[Plan, ...]:
    """The plans of a run that was planned anew, the first one included; none for others."""
    if not run.plans:
        return ()
    lasts = [str(p.round) for p in run.plans] + [str(int(run.summary["rounds"]))]
    firsts = [1, *(p.round + 1 for p in run.plans)]
    spans = [f"{a}–{b}" if str(a) != b else b for a, b in zip(firsts, lasts, strict=True)]
    begun = {r.worker: str(r.steps) for r in run.rounds if r.round == 1}
    first = Plan(spans[0], " ".join(begun[i] for i in sorted(begun)), DASH, DASH)
    later = [
        Plan(span, " ".join(map(str, p.steps)), " ".join(map(str, p.batch)), percent(p.gain))
        for span, p in zip(spans[1:], run.plans, strict=True)
    ]
    return (first, *later)


def _files(folder: Path) -> tuple[tuple[str, str], ...]:
    """Name and size of what lies in the folder; a subfolder counts as one entry."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size
        found.append((path.name + "/" * path.is_dir(), f"{short(size)}B" if size >= 1000 else f"{size} bytes"))
    return tuple(found)


def shown(charts: Sequence[Chart], of: str, single: bool = False) -> tuple[tuple[str, tuple[Shown, ...]], ...]:
    """The charts of a run or comparison under their headings; `of` tells its charts from those of others on the page."""
    return tuple(
        (title, tuple(Shown(f"{of}-{chart.name}", chart, themed(chart.svg)) for chart in group))
        for title, group in figures.parts(charts, single)
    )


def render(runs: Sequence[Run], version: str = "") -> str:
    """The page as HTML. BadInput without runs.

    Args:
        version: of a page that `gossamer watch` shows: a mark of what it is made of, for its script to ask for a newer one. Else empty.
    """
    if not runs:
        raise BadInput("no run to report on; expected at least one run folder")
    single = len(runs) == 1
    names = labels(runs)
    colors = [color for color, _ in styles(runs)]
    lines = settings(runs)
    cards = [
        Card(
            label=name,
            color=color,
            sentence=sentence(run),
            parts=() if single else shown(figures.beside(run, len(runs)), f"run-{k}"),
            seats=seats(run),
            equal=_equal(run),
            plans=plans(run),
            files=_files(run.folder),
            torn=run.torn,
        )
        for k, (run, name, color) in enumerate(zip(runs, names, colors, strict=True))
    ]
    parts = shown(figures.of_run(runs[0]) if single else figures.of_comparison(runs), "all", single)
    fleets = {fleet_name(run) for run in runs}
    fleet = fleets.pop() if len(fleets) == 1 else None
    subject = listed(list(dict.fromkeys(with_method(plain_label(run), run) for run in runs)))
    every = [one.html for group in (parts, *(card.parts for card in cards)) for _, charts in group for one in charts]
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.j2").render(
        heading=f"{subject} on {fleet}" if fleet else subject,
        kicker="Run" if single else f"Comparison of {len(runs)} runs",
        facts=facts(runs[0]) if single else "",
        lead=sentence(runs[0]) if single else comparison_sentence(runs),
        goes_on=goes_on(runs),
        charged=charged(runs),
        caution=caution(runs) if all(run.finished for run in runs) else "",
        alarms=alarms(runs),
        verdicts=verdicts(runs),
        tiles=tiles(runs[0]) if single else (),
        table=Markup(as_html(runs, () if single else colors)),
        parts=parts,
        dark=variables([*every, *(f"var(--c{color[1:]}," for color in colors)]),
        cards=cards,
        single=single,
        names=names,
        differing=[] if single else [line for line in lines if line.differs],
        common=lines if single else [line for line in lines if not line.differs],
        version=version,
    )


def write_page(folders: Sequence[Path | str], out_path: Path | str) -> Path:
    """Reads the run folders, writes one page to `out_path` and returns its path.

    One folder gives the report of a run, several a comparison. BadInput for a folder that is no run or a place that cannot be written.
    """
    if isinstance(folders, (str, Path)):
        raise BadInput(f"folders is {str(folders)!r}; expected a list of run folders")
    return write_whole(Path(out_path), render([Run.load(folder) for folder in folders]))

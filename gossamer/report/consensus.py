"""How far apart the workers of a gossip run were, against what their drifts and graphs lead to expect; and what a round of mixing left."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from gossamer.report.read import Run
from gossamer.report.style import PALETTE, WIDTH_IN, Chart, canvas, label_ends, plain_ticks, thin, to_svg

Line = list[tuple[float, float]]


def distance(run: Run) -> Chart | None:
    """Consensus distance by round, measured and expected, on a logarithmic axis; None for runs whose workers are equal."""
    found = run.agreement
    if found is None:
        return None
    measured, expected = _line(found.round, found.distance), _line(found.round, found.expected)
    drift = _line(found.round, found.drift)
    exact = [(float(e.round), e.consensus_distance) for e in run.evaluations if e.worker is None and e.consensus_distance]
    if not measured:
        return None
    with canvas(WIDTH_IN, 3.5) as (figure, axes):
        ends = []
        for line, color, dash, width, name in (
            (drift, "#8a949d", (0, (1.2, 1.6)), 1.4, "their drifts"),
            (expected, PALETTE[1], (0, (4, 2)), 1.9, "expected"),
            (measured, PALETTE[0], "-", 2.1, "measured"),
        ):
            if line:
                axes.plot(*zip(*thin(line), strict=True), color=color, ls=dash, lw=width, zorder=3, marker="o" if len(line) == 1 else "")
                ends.append((*line[-1], name, color))
        if exact and len(exact) <= 60:
            axes.plot(*zip(*exact, strict=True), ls="none", marker="o", ms=4.2, mfc="white", mec=PALETTE[0], mew=1.4, zorder=4)
        _log(axes, [y for line in (measured, expected, drift, exact) for _, y in line])
        _rounds(axes, found.round)
        axes.set_ylabel("distance from the mean")
        label_ends(figure, axes, ends)
        alt = f"Consensus distance: measured {measured[-1][1]:.3g} after round {found.round[-1]}"
        alt += f", expected {expected[-1][1]:.3g}." if expected else "."
        svg = to_svg(figure, f"consensus-{run.folder}", alt)
    caption = ["Root mean square over the workers, all parameters together, from sketches (a few per cent)."]
    if exact and len(exact) <= 60:
        caption.append("Circles: exact, at evaluations.")
    if expected:
        caption.append("Expected: from the spread of the drifts and the graphs of the rounds, were drifts unrelated to each other.")
        told = [a for a in found.alignment if a is not None]
        if told:
            mean = sum(told) / len(told)
            drawn = "apart" if mean > 0.03 else "together" if mean < -0.03 else ""
            caption.append(
                f"In fact they correlate with where a worker stands, {mean:+.2f} in the mean"
                + (f": inner steps draw workers {drawn}." if drawn else ", next to nothing.")
            )
    return Chart("consensus", "How far apart the workers are", " ".join(caption), alt, svg)


def contraction(run: Run) -> Chart | None:
    """What each round's mixing left of the disagreement, and what the topology leaves in the mean; None without mixing."""
    found = run.agreement
    if found is None:
        return None
    both = zip(found.round, found.before, found.after, strict=True)
    line = [(float(t), a / b) for t, b, a in both if b is not None and a is not None and b > 0]
    if not line or max(y for _, y in line) < 1e-4:
        return None
    law = found.contraction_expected
    rms = (sum(y * y for _, y in line) / len(line)) ** 0.5
    with canvas(WIDTH_IN, 3.5) as (figure, axes):
        shown = thin(line)
        axes.plot(*zip(*shown, strict=True), color=PALETTE[0], lw=1.2, marker="o" if len(shown) <= 60 else "", ms=3.6, zorder=3)
        axes.axhline(rms, color=PALETTE[0], lw=1.0, ls=(0, (1.2, 1.6)), zorder=2)
        last = line[-1][0]
        ends = [(last, rms, f"measured {rms:.3f}", PALETTE[0])]
        if law is not None:
            axes.axhline(law, color=PALETTE[1], lw=1.7, ls=(0, (4, 2)), zorder=2)
            ends.append((last, law, f"1 − gap {law:.3f}", PALETTE[1]))
        axes.set_ylim(0, max([1.0, *(y * 1.05 for _, y in line)]))
        _rounds(axes, found.round)
        axes.grid(axis="y")
        plain_ticks(axes, whole_x=True)
        axes.set_ylabel("left of the distance after mixing")
        label_ends(figure, axes, ends)
        alt = f"A round of mixing left {rms:.3f} of the distance as a root mean square" + (f"; 1 - gap is {law:.3f}." if law else ".")
        svg = to_svg(figure, f"contraction-{run.folder}", alt)
    caption = "Distance of what was said, after its mixing over before. Dotted: root mean square over the rounds."
    if law is not None:
        caption += " Dashed: 1 − spectral gap of the topology" + ("." if found.exact else ", estimated.")
        if not run.moves:
            caption += " On a fixed graph that is the slowest pattern of disagreement; others fade faster."
    return Chart("contraction", "What a round of mixing leaves", caption, alt, svg)


def single_workers(run: Run) -> str:
    """How good the workers' own models are beside their mean, in a sentence; empty where they are equal."""
    own, fleet = run.single, run.number("final_loss")
    if own is None or fleet is None:
        return ""
    gain = own.mean - fleet
    than = f"{abs(gain):.2g} nats per token {'better' if gain >= 0 else 'worse'} than" if gain else "as good as"
    each = f"{own.mean:.4f}; best {own.best:.4f}, worst {own.worst:.4f}"
    return f"The mean model ({fleet:.4f}) is {than} the single workers in the mean ({each})."


def charts(run: Run) -> list[Chart | None]:
    """Both figures."""
    return [distance(run), contraction(run)]


def _line(rounds: Sequence[int], values: Sequence[float | None]) -> Line:
    """Points that a logarithmic axis can show."""
    return [(float(t), v) for t, v in zip(rounds, values, strict=True) if v is not None and v > 0]


def _log(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 1.25, max(values) * 1.25)
    decades = max(values) / min(values)
    subs = (1.0,) if decades > 1e3 else (1.0, 3.0) if decades > 30 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.10g}" if 1e-3 <= v < 1e4 else f"{v:.0e}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    axes.grid(axis="y")


def _rounds(axes: Axes, rounds: Sequence[int]) -> None:
    low, high = min(rounds), max(rounds)
    axes.set_xlim(low - (0.5 if low == high else 0), high + (0.5 if low == high else 0.01 * (high - low)))
    axes.set_xlabel("round")
    plain_ticks(axes, y=None, whole_x=True)

"""`gossamer plan`: what a run would do to each worker and how long it would take, and the same for the usual other methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.app.footprint import outer_names
from gossamer.app.job import Job
from gossamer.app.planning.alternatives import Row, choice, others, row
from gossamer.app.planning.cost import charged_words, cost_lines, priced
from gossamer.app.planning.forecast import Forecast, forecast, modelled_s, simulated
from gossamer.app.planning.graphs import gap_line
from gossamer.app.progress import count, duration
from gossamer.app.workload import costs_of, micro_batch, plan_name, unhidden_of
from gossamer.core.awb import Balance
from gossamer.core.compensate import changes_peers
from gossamer.core.consensus import exact, rate, rounds_to, worst_rate
from gossamer.core.exchange import Hub
from gossamer.core.outer import Gossip
from gossamer.core.predict import unhidden_s
from gossamer.core.tree import numel
from gossamer.core.wires import Net
from gossamer.worker.packet import HEADER_BYTES

_SHOWN = 24
_NAMED = 3
_ROUNDS, _MESSAGES = 16, 20_000
"""Rounds that are simulated beside the formula, and up to how many messages they are."""


def plan(job: Job, console: Console, now: Callable[[str], None] = lambda text: None) -> None:
    """`show`, then the usual other methods, and which one would be chosen. `now` is told what goes on."""
    net = Net(job.fleet)
    now("a round is worked out")
    seen = forecast(job, net)
    show(job, console, seen)
    now("the usual other methods are worked out")
    tokens = job.method.total_tokens
    rows = with_own(others(job, net), row(job, f"{job.title} (configured)", plan_name(job.config), seen, tokens))
    console.print(_methods(job, rows))
    console.print(verdict(rows, tokens, charged_words(job, tokens)), highlight=False)


def with_own(rows: Sequence[Row], own: Row) -> list[Row]:
    """The usual methods and the configured one, which has one row: in the place of the usual one that it is, or else the last."""
    alike = sorted((row.plan != own.plan, k) for k, row in enumerate(rows) if row.configured)
    if not alike:
        return [*rows, own]
    _, k = alike[0]
    return [*rows[:k], replace(own, label=f"{rows[k].label} (configured)"), *rows[k + 1 :]]


def show(job: Job, console: Console, seen: Forecast) -> None:
    """Prints each worker's share of a round, and what it means for the run."""
    console.print(_workers(job, seen))
    if job.n > _SHOWN:
        console.print(f"... and {job.n - _SHOWN} more workers")
    lines = (*_measured_lines(job), *_run_lines(job, seen), *_model_lines(job, seen), *cost_lines(job, seen))
    for line in (*lines, *_balance_lines(job), *_memory_lines(job), *_outer_lines(job)):
        console.print(line, highlight=False)


def _measured_lines(job: Job) -> Iterator[str]:
    measured = sum(bool(site.step_s) for site in job.fleet.sites)
    if measured and job.charged_as:
        yield (
            f"note: the step times of {measured} of {len(job.fleet.sites)} sites are measured, and stay those of the model that was "
            f"profiled; bytes and outer state are those of {job.charged_as}. For one model in all, leave the clock's charge out"
        )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_style="bold", title_justify="left", pad_edge=False)
    for name in left:
        table.add_column(name, justify="left", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 or not seconds else f"{seconds:.3g}"


def _mb(n_bytes: float, digits: int = 1) -> str:
    """Megabytes, with more digits where there are few.

    >>> _mb(24_500_000), _mb(24_512_345, 2), _mb(2_304), _mb(0)
    ('24.5', '24.51', '0.0023', '0.0')
    """
    mb = n_bytes / 1e6
    return f"{mb:.{digits}f}" if mb >= 0.1 or not mb else f"{mb:.2g}"


def _charged(job: Job) -> str:
    return f"  (clock, bytes and memory charged as {job.charged_as})" if job.charged_as else ""


def _workers(job: Job, seen: Forecast) -> Table:
    plan, n = job.method.plan, job.n
    table = _table(
        f"{job.title}: a round on {job.fleet.name}{_charged(job)}",
        ("worker", "site", "GPU"),
        ("steps\nH", "batch\nB", "tokens", "compute\ns", "exchange\ns", "straggler\ns", "network\ns", "sent\nMB", "utilisation\n%"),
    )
    for i in range(min(n, _SHOWN)):
        site = job.fleet.site(i)
        table.add_row(
            str(i), site.name, site.gpu.name, str(plan.steps[i]), str(plan.batch[i]), f"{plan.tokens(i):,}", _s(seen.compute_s[i]),
            _s(seen.exchange_s[i]) if seen.exchange_s else "-", _s(seen.straggler_s[i]), _s(seen.network_s[i]),
            _mb(seen.sent_bytes[i]), f"{100 * seen.compute_s[i] / seen.wall_s[i]:.1f}",
        )  # fmt: skip
    return table


def _run_lines(job: Job, seen: Forecast) -> Iterator[str]:
    method, parameters = job.method, numel(job.layout)
    yield (
        f"{method.rounds} rounds of {count(method.plan.usual_tokens)} tokens: {count(method.total_tokens)} tokens"
        f"{charged_words(job, method.total_tokens)}, about {duration(seen.round_s * method.rounds)} of virtual time"
    )
    frozen = f" are trained and travel, {count(n)} are not" if (n := job.outline.frozen[0]) else ""
    sent = method.exchange.sent_bytes(method.wire, job.layout, method.heard_by, job.n, HEADER_BYTES)
    yield (
        f"model: {count(parameters)} parameters{frozen}; a worker sends {_mb(sent, 2)} MB a round ({sent / (4 * parameters):.3f} x fp32)"
        + (f", charged as {_mb(sent * job.bytes_charge)} MB" if job.charged_as else "")
        + (f", in the mean; the hub is worker {method.exchange.at}" if isinstance(method.exchange, Hub) else "")
    )
    yield (
        f"mean: utilisation {100 * seen.utilisation:.1f} %, straggler idle {100 * seen.straggler:.1f} %, "
        f"network idle {100 * seen.network:.1f} %"
    )


def _model_lines(job: Job, seen: Forecast) -> Iterator[str]:
    """The time of a round by the literature's model, by formula, and simulated."""
    model_s, gossip = modelled_s(job), changes_peers(job.method)
    if model_s is None:
        return
    law = "max_i (k_i T_i^comm + H_i T_i^comp)" if gossip else "max_i 2 T_i^comm + max_i H_i T_i^comp"
    line = f"a round: {_s(model_s)} s by the time model of Cagnasso et al. 2026 (T_step = {law}), "
    if seen.exchange_s is None:
        yield line + f"{_s(seen.round_s)} s in this simulation"
        return
    line += f"{_s(seen.round_s)} s worked out"
    if job.n * (job.method.heard_by if gossip else 2 * (job.n - 1)) * _ROUNDS <= _MESSAGES:
        line += f", {_s(simulated(job, _ROUNDS, noise=False).round_s)} s in the event simulation ({_ROUNDS} rounds, without noise)"
    yield line


def _balance_lines(job: Job) -> Iterator[str]:
    if plan_name(job.config) != "awb":
        return
    p, plan = job.config.plan, job.method.plan
    net, costs = Net(job.fleet), costs_of(job.config, job.fleet, plan.batch, job.charged)
    step_s, unhidden = costs.step_s, unhidden_of(job.config, net, job.method, job.layout, job.fleet, job.charged)
    paid = ""
    if changes_peers(job.method) and (whole := max(unhidden_s(job.method, net, job.layout, costs))):
        paid = f" ({100 * max(unhidden) / whole:.0f} % of it, which is quickest)"
    balanced = Balance(step_s, tuple(unhidden), plan, job.n * p.steps * p.batch * p.sequence)
    yield (
        f"balance: compute plus unhidden exchange{paid} differ by {balanced.spread_s:.2f} s at most; "
        f"{balanced.tokens_off:+,} tokens a round from those asked for; "
        f"whole steps cost {100 * balanced.loss:.1f} % of time a token against fractions of a step"
        + (", which carrying them from round to round gains back" if p.carry else "")
    )


def _memory_lines(job: Job) -> Iterator[str]:
    p, charged = job.config.plan, job.charged
    memory = charged.footprint(job.method)
    kinds = {(job.fleet.site(i), b): None for i, b in enumerate(job.method.plan.batch)}
    said: dict[tuple[str, str], list[str]] = {}  # (GPU, what of it) -> whose
    for site, batch in kinds:
        fits = memory.batch_max(site, charged.sequence, p.headroom)
        known = "measured" if site.memory_gb else "estimated"
        text = f"{memory.step_gb(site, batch * charged.sequence):.2f} of {site.limit_gb:g} GB ({known})"
        if fits is not None:
            text += f", room for B = {fits:,} with {100 * p.headroom:g} % kept free"
            cut = micro_batch(job.config, site, batch)
            if not fits:
                text += ": not even one sequence fits, so take shorter ones, or a smaller model"
            elif fits < batch and (cut is None or cut > fits):
                text += ": B does not fit, so take it in parts (plan.micro_batch), or lower plan.batch"
            elif fits < batch:
                text += f": B does not fit, so {cut} at a time"
        said.setdefault((site.gpu.name, text), []).append(f"{site.name} with B = {batch}")
    alike = Counter(gpu for gpu, _ in said)
    shown = list(said.items())[:_SHOWN]
    for (gpu, text), whose in shown:
        named = ", ".join([gpu, *whose[:_NAMED]]) + (f" and {len(whose) - _NAMED} more" if len(whose) > _NAMED else "")
        yield f"memory, {named if alike[gpu] > 1 else gpu}: {text}"
    if len(said) > len(shown):
        yield f"... and {len(said) - len(shown)} more kinds"


def _outer_lines(job: Job) -> Iterator[str]:
    method = job.method
    yield _outer_line(job)
    if isinstance(method.outer, Gossip) and not method.outer.linear and job.n > 1:
        yield "consensus: the outer optimizer is not linear in the disagreement, so no rate is known; workers stay about its step apart"
    elif isinstance(method.outer, Gossip) and job.n > 1:
        o = method.outer
        r = rate(o.form, method.topology, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov)
        yield (
            f"consensus: the workers' disagreement shrinks by {r:.3f} a round ({'exact' if exact(method.topology) else 'estimated'}), "
            + (f"to a thousandth in {max(1.0, rounds_to(r)):.0f} rounds" if r < 1 else "so it does NOT shrink: lower the outer momentum")
        )
        if tau := method.cadence.overlap:
            r = worst_rate(o.form, method.topology, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov, overlap=tau)
            yield f"consensus under overlap {tau:g}: at worst {r:.3f} a round, where inner steps go most of the way to an optimum"
    yield from gap_line(job)


def _outer_line(job: Job) -> str:
    """The bytes of outer state, what they are, and where."""
    names, layout = outer_names(job.method), job.charged.layout
    one = 4 * numel(layout)
    said = f"outer state per worker, beside the model: {_mb(len(names) * one)} MB"
    if len(names) > 1:
        said += f", {_mb(one)} MB each"
    said += f": {', '.join(names)}" + (" of the model that is charged" if job.charged_as else "")
    if (feedback := job.method.feedback) is not None and feedback.at_mean:
        said += f"; the errors of one slice, {_mb(one / job.n)} MB"
    if job.config.run.offload:
        passing = sum(part.size * part.dtype.itemsize for part in layout)
        return f"{said}; in the host's memory, and {_mb(passing)} MB there, pinned, through which the parameters pass"
    if job.config.run.device == "cpu":
        return f"{said}; in the host's memory, where the model is"
    return f"{said}; in the GPU's memory where there is one (run.offload = true: in the host's)"


def _methods(job: Job, rows: Sequence[Row]) -> Table:
    money, tokens = [f"cost\n{job.fleet.currency}"] if priced(job) else [], job.method.total_tokens
    table = _table(
        f"To {count(tokens)} tokens{charged_words(job, tokens)} on {job.fleet.name}{_charged(job)}",
        ("method", "plan"),
        ("time", "utilisation\n%", "straggler\n%", "network\n%", "sent\nMB a round", *money),
    )
    for r in rows:
        f = r.forecast
        table.add_row(
            r.label, r.plan, duration(r.time_s), f"{100 * f.utilisation:.1f}", f"{100 * f.straggler:.1f}", f"{100 * f.network:.1f}",
            _mb(sum(f.sent_bytes) / len(f.sent_bytes)), *([f"{r.cost:,.2f}"] if r.cost is not None else []),
        )  # fmt: skip
    return table


def verdict(rows: Sequence[Row], tokens: int, charged: str = "") -> str:
    """Which row would be chosen, and why, in a sentence or two. `rows`: the first is what the others are held against; `charged`: of
    `charged_words`."""
    best, first = choice(rows), rows[0]
    f = best.forecast
    less = "" if best is first else f", {100 * (1 - best.time_s / first.time_s):.0f} % less than {first.label}"
    return (
        f"Choice: {best.label} with plan {best.plan}, {duration(best.time_s)} for {count(tokens)} tokens{charged}{less}: its workers "
        f"compute {100 * f.utilisation:.1f} % of the time, wait {100 * f.straggler:.1f} % for slower ones and {100 * f.network:.1f} % for "
        "the network. This is time alone: what a method learns per token is not predicted, gossamer compare shows it."
        + ("\nIts settings: " + " ".join(f"--set {s}" for s in best.settings) if best.settings else "")
    )

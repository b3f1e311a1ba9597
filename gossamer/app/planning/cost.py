"""What a run costs where the fleet's sites have prices: GPUs by the hour, and what leaves a region by the gigabyte.

    GPUs    = sum_i T / 3600 * ranks_i * price_gpu_h_i               T: seconds of the whole run, which all workers are held for
    egress  = sum_i rounds * bytes_i * away_i * price_egress_gb_i / 1e9

bytes_i: what worker i sends a round; away_i: the share of its messages that go to workers of other regions. What stays within a region, a
site included, costs nothing. A site without a price adds nothing, and is said to have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.app.job import Job
from gossamer.app.planning.forecast import Forecast
from gossamer.app.progress import count
from gossamer.core.exchange import Hub, Ring
from gossamer.core.method import Method
from gossamer.core.predict import of_law, rounds_of_law


@dataclass(frozen=True)
class Cost:
    """Of a run, in the fleet's currency."""

    gpus: float
    egress: float
    gpu_h: float
    """GPU-hours, those without a price included."""
    away_gb: float
    """What leaves the workers' regions, GB = 1e9 bytes, likewise."""

    @property
    def total(self) -> float:
        """All that has a price."""
        return self.gpus + self.egress


def priced(job: Job) -> bool:
    """Whether a site of the fleet has a price."""
    return any(site.price_gpu_h is not None or site.price_egress_gb is not None for site in job.fleet.sites)


def cost(job: Job, seen: Forecast, tokens: int) -> Cost:
    """Of `tokens` tokens by the forecast of a round. Servers are not in it: neither their machines nor what they send."""
    rounds = tokens / (job.method.total_tokens / job.method.rounds)
    hours, away = seen.round_s * rounds / 3600, aways(job)
    gpus = egress = gpu_h = away_gb = 0.0
    for i, share in enumerate(away):
        site, gb = job.fleet.site(i), rounds * seen.sent_bytes[i] * share / 1e9
        gpu_h += hours * site.ranks
        away_gb += gb
        gpus += hours * site.ranks * (site.price_gpu_h or 0.0)
        egress += gb * (site.price_egress_gb or 0.0)
    return Cost(gpus, egress, gpu_h, away_gb)


def charged_tokens(job: Job, tokens: int) -> int | None:
    """As how many `tokens` of the run are charged (clock.charge_tokens); None: as what they are."""
    p, step = job.config.plan, job.config.clock.charge_tokens
    found = round(tokens * step / (p.batch * p.sequence)) if step else tokens
    return None if found == tokens else found


def charged_words(job: Job, tokens: int) -> str:
    """To be said behind a number of tokens that something which is charged is said of; empty where they are charged as what they are."""
    found = charged_tokens(job, tokens)
    return "" if found is None else f", charged as {count(found)} tokens"


def aways(job: Job) -> list[float]:
    """Of each worker, the share of its messages that go to another region: of gossip the mean over graphs of the same law."""
    method, n = job.method, job.n
    regions = [job.fleet.site(i).region for i in range(n)]
    if method.tiers or n == 1:  # a worker speaks to the server of its own region alone
        return [0.0] * n
    inside = Counter(regions)
    to_any = [(n - inside[region]) / (n - 1) for region in regions]
    exchange = method.exchange
    if isinstance(exchange, Ring):
        return [float(regions[i] != regions[(i + 1) % n]) for i in range(n)]
    if isinstance(exchange, Hub):
        return [to_any[i] if i == exchange.at else float(regions[i] != regions[exchange.at]) for i in range(n)]
    return to_any if method.synchronous or method.heard_by == n - 1 else _by_law(method, regions, to_any)


def _by_law(method: Method, regions: list[str], to_any: list[float]) -> list[float]:
    law = of_law(method.topology)
    if law.random and getattr(law, "admissible", None) is None:
        return to_any  # peers are drawn from all
    n, told, away = len(regions), Counter[int](), Counter[int]()
    for t in range(rounds_of_law(n)):
        graph = law.at(t)
        for i in range(n):
            out = graph.out(i)
            told[i] += len(out)
            away[i] += sum(regions[j] != regions[i] for j in out)
    return [away[i] / told[i] if told[i] else 0.0 for i in range(n)]


def cost_lines(job: Job, seen: Forecast) -> Iterator[str]:
    """The sum, what it is made of, and what has no price."""
    if not priced(job):
        return
    tokens = job.method.total_tokens
    money, found, charged = job.fleet.currency, cost(job, seen, tokens), charged_tokens(job, tokens)
    of = "a million tokens" if charged is None else f"a million of the {count(charged)} tokens that are charged"
    yield (
        f"cost of the run: {found.total:,.2f} {money}: {found.gpus:,.2f} for {found.gpu_h:,.2f} GPU-hours, {found.egress:,.2f} for "
        f"{found.away_gb:,.3f} GB that leave their region; {1e6 * found.total / (charged or tokens):,.4g} {money} {of}"
    )
    for key, what in (("price_gpu_h", "GPU-hour"), ("price_egress_gb", "GB of egress")):
        lacking = [site.name for site in job.fleet.sites if getattr(site, key) is None]
        if lacking:
            names = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
            yield f"not in it: no price of a {what} is given for {names} ({key} in the fleet file)"
    if job.method.tiers:
        yield "not in it: the servers' machines, and what they send each other"

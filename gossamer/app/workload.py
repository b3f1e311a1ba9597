"""Who does how much: the plan of a run from its configuration, the fleet, and what the exchange leaves unhidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gossamer.app.footprint import Footprint, footprint
from gossamer.app.settings import Config
from gossamer.core.awb import balance, knee, real_steps
from gossamer.core.compensate import paid_s
from gossamer.core.fleet import Fleet, Site
from gossamer.core.method import Method
from gossamer.core.plan import Plan, proportional, uniform
from gossamer.core.predict import Costs, step_times
from gossamer.core.tree import Layout
from gossamer.core.wires import Net
from gossamer.recipes import DEFAULT_PLAN
from gossamer.worker.packet import HEADER_BYTES


@dataclass(frozen=True)
class Charged:
    """The model that the clock and the memory are of: the one trained, or a bigger one in its place."""

    layout: Layout
    model: Any
    """Its transformers configuration."""
    flops_per_token: float
    """Of training on one token of the run."""
    bytes_charge: float
    """Bytes on the clock per byte sent."""
    sequence: int
    """Tokens that one sequence of the run stands for."""
    activation_bytes: Literal[2, 4]
    frozen_bytes: int = 0
    """Of parameters that are not trained."""
    recomputed: bool = False
    """Whether a block keeps what enters it alone."""
    offload: bool = False
    """Whether the float32 copies of the outer step are in the host's memory."""

    def footprint(self, method: Method) -> Footprint:
        """The estimate of memory, for sites without a measured one."""
        return footprint(method, self.layout, self.model, self.activation_bytes, self.frozen_bytes, self.recomputed, self.offload)


def costs_of(config: Config, fleet: Fleet, batch: tuple[int, ...], charged: Charged) -> Costs:
    """What the clock charges for a round with these B_i."""
    times_s = step_times(fleet, batch, config.plan.sequence, charged.flops_per_token)
    return Costs(times_s, config.clock.codec_gbytes_per_s, HEADER_BYTES, charged.bytes_charge)


def unhidden_of(config: Config, net: Net, method: Method, layout: Layout, fleet: Fleet, charged: Charged) -> list[float]:
    """What a balanced plan leaves every worker time for, in seconds: c_i, of gossip the share of it that is worth steps; 0 where workers
    talk to servers."""
    if method.tiers:
        return [0.0] * method.n
    p = config.plan
    return paid_s(method, net, layout, costs_of(config, fleet, method.plan.batch, charged), method.n * p.steps * p.batch * p.sequence)


def plan_name(config: Config) -> str:
    """The kind of plan that the configuration asks for, by name or by its method."""
    return config.plan.name or DEFAULT_PLAN.get(config.method.name, "uniform")


def plan_of(config: Config, fleet: Fleet, layout: Layout, charged: Charged, method_of: Callable[[Plan], Method]) -> Plan:
    """The plan that the configuration asks for.

    Args:
        layout: of the trained model: what is exchanged.
        method_of: the method with a given plan; awb asks it how the exchange goes.
    """
    p = config.plan
    name = plan_name(config)
    if name == "proportional":
        return proportional(fleet.speeds(p.batch, p.sequence, charged.flops_per_token), p.steps, p.batch, p.sequence)
    even = uniform(fleet.n, p.steps, p.batch, p.sequence)
    if name == "uniform":
        return even
    draft = method_of(even)
    memory = charged.footprint(draft)
    found: dict[Site, int] = {}
    for site in fleet.sites:
        found[site] = _batch(config, site, memory, charged)
    batch = tuple(found[fleet.site(i)] for i in range(fleet.n))
    draft = replace(draft, plan=replace(draft.plan, batch=batch))
    step_s = costs_of(config, fleet, batch, charged).step_s
    asked = step_s, batch, unhidden_of(config, Net(fleet), draft, layout, fleet, charged), even.tokens_per_round, p.sequence
    plan = balance(*asked)
    return replace(plan, exact=real_steps(*asked)) if p.carry else plan


def _batch(config: Config, site: Site, memory: Footprint, charged: Charged) -> int:
    """B of the site's workers: the knee of tokens a second from plan.batch to plan.batch_max, or as much as memory holds of plan.batch.

    Where not even one sequence fits it is 1: an estimate may be wrong, and nothing smaller can be planned. With plan.fit = false memory is
    not looked at: a batch can pass through the model in parts.
    """
    p = config.plan
    most = p.batch_max or p.batch
    fits = memory.batch_max(site, charged.sequence, p.headroom) if p.fit else None
    if fits is not None:
        most = max(1, min(most, fits))
    return knee(lambda b: site.time_s(b * p.sequence, charged.flops_per_token), min(p.batch, most), most, p.knee)


def micro_batch(config: Config, site: Site, batch: int) -> int | None:
    """Sequences of one pass of a worker with `batch` sequences a step; None: all at once.

    By itself a batch is cut only where the site's memory was measured, and of the model that is trained: an estimate changes no bits.
    """
    p, clock = config.plan, config.clock
    if p.micro_batch is not None:
        return p.micro_batch if p.micro_batch < batch else None
    if not site.memory_gb or clock.charge_as or clock.charge_tokens:
        return None
    fits = site.batch_max(p.sequence, p.headroom)
    return None if fits is None or fits >= batch else max(1, fits)

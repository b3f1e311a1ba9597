"""From a configuration to everything that a run needs, checked before anything is created."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gossamer.app import corpora, fleets
from gossamer.app.config import config_hash
from gossamer.app.fates import check_fates
from gossamer.app.models import Models, Outline, charged_of, check_machine, check_symbols, outline_of
from gossamer.app.options import check_options, find_recipe
from gossamer.app.settings import Config
from gossamer.app.workload import Charged, micro_batch, plan_of, unhidden_of
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.fragment import fragments
from gossamer.core.inner import Inner, inner_named
from gossamer.core.matching import Rates
from gossamer.core.method import Method
from gossamer.core.plan import Plan, uniform
from gossamer.core.ranges import Ranges
from gossamer.core.schedule import schedule_named
from gossamer.core.slowdown import Slowdown
from gossamer.core.tiers import hosts, regions_of
from gossamer.core.tree import Layout, Tree, layout_hash, numel
from gossamer.core.wires import Net
from gossamer.recipes import REGISTRY, Setting
from gossamer.sim.network import Network
from gossamer.sim.seats import SeatNetwork
from gossamer.train import model
from gossamer.train.compute import Precision, TrainBody, device_named
from gossamer.train.data import Corpus
from gossamer.train.evaluate import evaluate_tree
from gossamer.train.offload import HOST, Offloaded
from gossamer.train.recut import Place
from gossamer.train.shard import Ranks, compile_blocks, shard
from gossamer.worker.effects import Program
from gossamer.worker.peer import start
from gossamer.worker.seat import Combine, Seat
from gossamer.worker.server import programs
from gossamer.worker.state import State


@dataclass(frozen=True)
class Job:
    """A run, resolved."""

    config: Config
    fleet: Fleet
    method: Method
    outline: Outline
    """The model that is trained."""
    charged: Charged
    """What the clock charges."""

    @property
    def layout(self) -> Layout:
        """What is exchanged."""
        return self.outline.layout

    @property
    def flops_per_token(self) -> float:
        """Of training on one token, as charged to the clock."""
        return self.charged.flops_per_token

    @property
    def bytes_charge(self) -> float:
        """Bytes on the clock per byte sent."""
        return self.charged.bytes_charge

    def variant(self, config: Config) -> Job:
        """Another method or plan on the same fleet and model: `config` may differ in its sections method and plan (but for its sizes)."""
        return _assemble(config, self.fleet, self.outline, self.charged)

    @property
    def n(self) -> int:
        """Workers."""
        return self.method.n

    @property
    def title(self) -> str:
        """The label of the run in tables and figures."""
        return self.config.name or self.method_name

    @property
    def method_name(self) -> str:
        """What tables call the method: its own name; the path of a recipe of one's own whose method has kept the name of one of ours."""
        ours = REGISTRY.get(self.method.name)
        return self.method.name if ours in (None, find_recipe(self.config.method.name)) else self.config.method.name

    @property
    def charged_as(self) -> str | None:
        """What the clock charges in place of what was trained, in words."""
        clock = self.config.clock
        said = [clock.charge_as] if clock.charge_as else []
        if clock.charge_tokens:
            said.append(f"{clock.charge_tokens:,} tokens a step")
        return " at ".join(said) or None

    @cached_property
    def run_id(self) -> int:
        """A mark of the configuration and all that it names (fleet, plan, method, model). It travels in each packet, and a run is resumed
        only with the one that it began with."""
        text = f"{config_hash(self.config)} {self.fleet!r} {self.method!r} {layout_hash(self.layout)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @cached_property
    def ranges(self) -> Ranges | None:
        """How the workers of a real run cut the model over their ranks; None where every worker has one."""
        return Ranges(self.fleet.ranks, model.rows_of(self.outline.meta)) if max(self.fleet.ranks) > 1 else None

    def rank_seat(self, seat: int) -> Seat:
        """The place in the run of one rank of a worker."""
        if self.ranges is None:
            return self.seat(seat)
        worker, rank = self.ranges.place(seat)
        atoms = self.ranges.atoms(self.layout)
        held = self.ranges.held(atoms, worker, rank)
        return Seat(worker, self.method, held, self.run_id, rank=rank, ranges=self.ranges, whole=atoms)

    def place(self, rank: int, ranks: int) -> Place:
        """One of the ranks of a worker, as checkpoints cut the model over them."""
        return Place(rank, ranks, self.ranges.rows if self.ranges else None)

    def seat(self, worker: int, combine: Combine | None = None) -> Seat:
        """Worker's place in the run."""
        seat = Seat(worker, self.method, self.layout, self.run_id)
        return replace(seat, combine=combine) if combine else seat

    @cached_property
    def models(self) -> Models:
        """What this process makes of `outline`."""
        return Models(self.outline, self.config.seed)

    def model(self) -> Any:
        """The model with its first weights, in float32."""
        return self.models.first()

    @property
    def origin(self) -> str:
        """Where the first weights come from, in words."""
        given = self.config.model.checkpoint
        return f"model.checkpoint = {given!r}" if given else f"seed {self.config.seed}"

    def first_state(self, worker: int, x: Tree, seat: Seat | None = None) -> State:
        """A worker's state before the first round; `seat`: that of one of its ranks."""
        return start(seat or self.seat(worker), x)

    @property
    def servers(self) -> int:
        """Seats beside the workers'."""
        return self.method.tiers.servers if self.method.tiers else 0

    def programs(self, states: Sequence[State], combine: Combine | None = None) -> list[Program]:
        """The programs of all seats, from the workers' states."""
        return programs([self.seat(i, combine) for i in range(self.n)], states)

    def network(self) -> Network | SeatNetwork:
        """The simulated network between all seats."""
        sharing, seed = self.config.clock.sharing, self.config.seed
        tiers = self.method.tiers
        return SeatNetwork(self.fleet, hosts(self.fleet, tiers), seed, sharing) if tiers else Network(self.fleet, seed, sharing)

    def corpus(self) -> Corpus:
        """What is trained and validated on, from the cache or made now. Whatever this machine lacks for the model is said before."""
        check_machine(self.config, self.device, self.precision)
        found = corpora.load(self.config)
        check_symbols(self.config, found.vocab_size, self.outline.symbols)
        return found

    @property
    def device(self) -> torch.device:
        """Where the models of this process are: on the GPU of its local rank, where it is one of several processes of a machine."""
        found = device_named(self.config.run.device)
        if found.type == "cuda" and "LOCAL_RANK" in os.environ:
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        return found

    @property
    def home(self) -> torch.device:
        """Where anchors, outer state and residuals are."""
        return HOST if self.config.run.offload else self.device

    @property
    def precision(self) -> Precision:
        """Of forward and backward passes."""
        asked = self.config.model.precision
        if asked != "auto":
            return asked
        return "bf16" if self.device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"

    def body(self, worker: int, corpus: Corpus, pace_s: float | None = None, ranks: Ranks | None = None) -> TrainBody:
        """What does the worker's inner steps, or a rank's share of them. Real runs may pace it; the simulator charges its own clock
        instead."""
        most = micro_batch(self.config, self.fleet.site(worker), self.method.plan.batch[worker])
        network = self.models.worker(alone=ranks is not None)
        if backend := self.config.model.compile:
            compile_blocks(network, backend)
        make = Offloaded if self.config.run.offload else TrainBody
        return make(
            network,
            self.method.inner,
            self.method.schedule,
            self.method.total_tokens,
            corpus.batches(self.config.plan.sequence, self.config.seed, worker, self.n),
            seed=self.config.seed,
            worker=worker,
            device=self.device,
            precision=self.precision,
            pace_s=pace_s,
            slow=self._slow(worker),
            micro_batch=most if most is None or ranks is None else max(1, most // ranks.size),
            ranks=ranks,
        )

    def judge(self, corpus: Corpus, ranks: Ranks | None = None) -> Callable[[Tree], float]:
        """A function from parameters to their validation loss in nats; it has a model of its own, of several ranks a shard of it."""
        scratch = shard(self.model(), ranks) if ranks else self.models.judge().to(self.device)
        e, length = self.config.eval, self.config.plan.sequence
        return lambda tree: evaluate_tree(scratch, tree, corpus, e.sequences, length, e.batch, self.precision).loss

    def due(self, every: int, round: int) -> bool:
        """Whether what is done every so many rounds (0: never) and at the end is done after `round`."""
        return round == self.method.rounds or (every > 0 and round % every == 0)

    @property
    def slowdown(self) -> Slowdown | None:
        """The worker that slows down in the middle of the run."""
        clock = self.config.clock
        return None if clock.slow_worker < 0 else Slowdown(clock.slow_worker, clock.slow_factor, clock.slow_at)

    @property
    def goes_on(self) -> bool:
        """Whether the others go on when a worker has died."""
        able = self.method.outlives or self.method.tiers is not None
        return self.config.run.on_death == "continue" or (self.config.run.on_death == "auto" and able)

    @property
    def kills(self) -> dict[int, int]:
        """Worker -> rounds that it completes before it dies."""
        return {pair[0]: pair[1] for pair in self.config.clock.kill}

    @property
    def returns(self) -> dict[int, int]:
        """Worker -> rounds that the first of the others has completed when it comes back."""
        return {pair[0]: pair[1] for pair in self.config.clock.back}

    def _slow(self, worker: int) -> tuple[float, float]:
        """(planned tokens from which `worker` is slow, by what factor)."""
        slowdown, rounds = self.slowdown, self.method.rounds
        if slowdown is None or slowdown.worker != worker:
            return math.inf, 1.0
        return float(self.method.plan.tokens_before(slowdown.first_round(rounds))), slowdown.factor

    def pace_s(self, worker: int, round: int = 0) -> float | None:
        """Seconds an inner step of `worker` takes in `round` of a real run, the fastest worker's being `clock.pace_s`; None: as fast as it
        goes.

        Raises:
            BadInput: a worker shall slow down, and has no pace.
        """
        base_s = self.config.clock.pace_s
        if not base_s:
            if self.slowdown:
                raise BadInput(
                    "clock.slow_worker slows the pace of a real run, and there is none: set clock.pace_s, or clock.slow_worker = -1"
                )
            return None
        plan = self.method.plan
        times_s = [self.fleet.step_s(i, plan.batch[i], plan.sequence, self.flops_per_token) for i in range(self.n)]
        return base_s * times_s[worker] / min(times_s) * (self.slowdown.of(worker, round, self.method.rounds) if self.slowdown else 1.0)


def resolve(config: Config) -> Job:
    """Everything about a run but its tokens and weights.

    Raises:
        BadInput: a part is unknown, or the parts cannot work together.
    """
    fleet = fleets.load(config.fleet.name, config.fleet.workers)
    sequence, tokens = config.plan.sequence, config.clock.charge_tokens
    outline = outline_of(config)
    charged = charged_of(config, outline)
    flops = charged.flops_per_token(sequence)
    return _assemble(
        config,
        fleet,
        outline,
        Charged(
            layout=charged.layout,
            model=charged.config,
            flops_per_token=flops * tokens / (config.plan.batch * sequence) if tokens else flops,
            bytes_charge=numel(charged.layout) / numel(outline.layout),  # before the codec is known
            sequence=-(-tokens // config.plan.batch) if tokens else sequence,
            activation_bytes=4 if config.model.precision == "fp32" else 2,
            frozen_bytes=charged.frozen[1],
            recomputed=outline.source.activation_checkpointing,
            offload=config.run.offload,
        ),
    )


def _assemble(config: Config, fleet: Fleet, outline: Outline, charged: Charged) -> Job:
    """The job of `config` on what it trains and where."""
    layout = outline.layout
    recipe = find_recipe(config.method.name)
    options = check_options(recipe, config.method.options, reserved=("setting",))
    flops = charged.flops_per_token

    def method_of(plan: Plan) -> Method:
        setting = Setting(
            plan,
            config.run.rounds or plan.rounds_of(config.run.tokens or 0),
            seed=config.seed,
            inner=_inner(config),
            schedule=schedule_named(config.schedule.name, config.schedule.given()),
            speeds=tuple(fleet.speeds(plan.batch, plan.sequence, flops)),
            regions=regions_of([fleet.site(i).region for i in range(fleet.n)]),
            rates=lambda: Rates.of(fleet),
        )
        method = recipe(setting, **options)
        if not isinstance(method, Method):
            raise BadInput(
                f'method.name = "{config.method.name}" returned {type(method).__name__}: expected a function that returns a Method'
            )
        return _with_inner(method, config)

    p = config.plan
    wire = method_of(uniform(fleet.n, p.steps, p.batch, p.sequence)).wire
    charged = replace(charged, bytes_charge=wire.nbytes(charged.layout) / wire.nbytes(layout))
    plan = plan_of(config, fleet, layout, charged, method_of)
    if config.clock.slow_worker >= fleet.n:
        raise BadInput(
            f"clock.slow_worker = {config.clock.slow_worker}, but workers are 0 to {fleet.n - 1}: name one of them, or -1 for none"
        )
    method = method_of(plan)
    if resized := config.checkpoint.resized:
        round, _, tokens, total = resized[-1]
        method = method.resumed(round, tokens, total)
    if config.run.deadline_s:
        method = replace(method, deadline_s=config.run.deadline_s)
    check_fates(config, method)
    fragments(layout, method.cadence.fragments)  # refuses more of them than tensors
    if method.replan and not method.replan.unhidden_s:
        unhidden = unhidden_of(config, Net(fleet), method, layout, fleet, charged)
        method = replace(method, replan=replace(method.replan, unhidden_s=tuple(unhidden)))
    return Job(config, fleet, method, outline, charged)


def _inner(config: Config) -> Inner | None:
    """The inner optimizer named in the configuration; None where it is left to the method."""
    if not config.inner.name:
        return None
    given = config.inner.given()
    if "lr" not in given:
        raise BadInput(
            f'inner.name = "{config.inner.name}" needs inner.lr, its peak learning rate (1e-3 is a start for lion, 3e-3 for adamw)'
        )
    return inner_named(config.inner.name, given)


def _with_inner(method: Method, config: Config) -> Method:
    """The method with the fields of its own inner optimizer that the configuration sets."""
    given = config.inner.given()
    if config.inner.name or not given:
        return method
    inner: Any = method.inner
    return replace(method, inner=replace(inner, **given))

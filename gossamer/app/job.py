"""From a configuration to everything that a run needs, checked before anything is created."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gossamer.app import fleets
from gossamer.app.config import config_hash
from gossamer.app.options import check_options, find_recipe
from gossamer.app.settings import Config
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.inner import Inner, inner_named
from gossamer.core.method import Method
from gossamer.core.plan import Plan, proportional, uniform
from gossamer.core.schedule import schedule_named
from gossamer.core.tree import Layout, Tree, layout_hash, numel
from gossamer.recipes import DEFAULT_PLAN, Setting
from gossamer.train import data, model
from gossamer.train.compute import Precision, TrainBody, device_named
from gossamer.train.data import Corpus, Sampler
from gossamer.train.evaluate import evaluate_tree
from gossamer.worker.peer import start
from gossamer.worker.seat import Combine, Seat
from gossamer.worker.state import State


@dataclass(frozen=True)
class Job:
    """A run, resolved."""

    config: Config
    fleet: Fleet
    method: Method
    layout: Layout
    flops_per_token: float
    """Of training on one token, as charged to the clock."""
    bytes_charge: float
    """Bytes on the clock per byte sent."""

    @property
    def n(self) -> int:
        """Workers."""
        return self.method.n

    @property
    def title(self) -> str:
        """The label of the run in tables and figures."""
        return self.config.name or self.method.name

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

    def seat(self, worker: int, combine: Combine | None = None) -> Seat:
        """Worker's place in the run."""
        seat = Seat(worker, self.method, self.layout, self.run_id)
        return replace(seat, combine=combine) if combine else seat

    def model(self) -> Any:
        """The model with its first weights, a function of the seed."""
        spec, vocab = _spec(self.config)
        return model.build(spec, vocab, self.config.seed)

    def first_state(self, worker: int, x: Tree) -> State:
        """A worker's state before the first round."""
        return start(self.seat(worker), x)

    def corpus(self) -> Corpus:
        """Tokens, from the cache or made now."""
        settings = self.config.data
        found = data.load(
            settings.source,
            sequence=self.config.plan.sequence,
            vocab_size=settings.vocab_size,
            tokenizer=settings.tokenizer,
            limit_bytes=round(settings.limit_mb * 1e6),
        )
        if found.vocab_size > _spec(self.config)[1]:
            raise BadInput(
                f"the tokenizer has {found.vocab_size} symbols and the model room for {_spec(self.config)[1]}: raise data.vocab_size"
            )
        return found

    @property
    def device(self) -> torch.device:
        """Where the models of this process are: on the GPU of its local rank, where it is one of several processes of a machine."""
        found = device_named(self.config.run.device)
        if found.type == "cuda" and "LOCAL_RANK" in os.environ:
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        return found

    @property
    def precision(self) -> Precision:
        """Of forward and backward passes."""
        asked = self.config.model.precision
        if asked != "auto":
            return asked
        return "bf16" if self.device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"

    def body(self, worker: int, corpus: Corpus, pace_s: float | None = None) -> TrainBody:
        """What does the worker's inner steps. Real runs may pace it; the simulator charges its own clock instead."""
        network = self.model()
        if self.config.model.dtype == "bf16":
            network = network.to(torch.bfloat16)
        return TrainBody(
            network,
            self.method.inner,
            self.method.schedule,
            self.method.total_tokens,
            Sampler(corpus.train, self.config.plan.sequence, self.config.seed, worker),
            seed=self.config.seed,
            worker=worker,
            device=self.device,
            precision=self.precision,
            pace_s=pace_s,
        )

    def judge(self, corpus: Corpus) -> Callable[[Tree], float]:
        """A function from parameters to their validation loss in nats; it has a model of its own."""
        scratch = self.model().to(self.device)
        e, length = self.config.eval, self.config.plan.sequence
        return lambda tree: evaluate_tree(scratch, tree, corpus, e.sequences, length, e.batch, self.precision).loss

    def pace_s(self, worker: int) -> float | None:
        """Seconds an inner step of `worker` takes in a real run, the fastest worker's being `clock.pace_s`; None: as fast as it goes."""
        base_s = self.config.clock.pace_s
        if not base_s:
            return None
        plan = self.method.plan
        times_s = [self.fleet.step_s(i, plan.batch[i], plan.sequence, self.flops_per_token) for i in range(self.n)]
        return base_s * times_s[worker] / min(times_s)


def resolve(config: Config) -> Job:
    """Everything about a run but its tokens and weights.

    Raises:
        BadInput: a part is unknown, or the parts cannot work together.
    """
    fleet = fleets.load(config.fleet.name, config.fleet.workers)
    recipe = find_recipe(config.method.name)
    options = check_options(recipe, config.method.options, reserved=("setting",))
    spec, vocab = _spec(config)
    layout = model.meta_layout(spec, vocab)
    sequence = config.plan.sequence
    charged = config.clock.charge_as or spec
    charged_vocab = None if config.clock.charge_as else vocab
    flops = model.flops_per_token(charged, sequence, charged_vocab)
    charge = numel(model.meta_layout(charged, charged_vocab)) / numel(layout)
    if config.clock.charge_tokens:
        flops *= config.clock.charge_tokens / (config.plan.batch * sequence)
    plan = _plan(config, fleet, flops)
    rounds = config.run.rounds or -(-(config.run.tokens or 0) // plan.tokens_per_round)
    setting = Setting(
        plan, rounds, seed=config.seed, inner=_inner(config), schedule=schedule_named(config.schedule.name, config.schedule.given())
    )
    method = recipe(setting, **options)
    if not isinstance(method, Method):
        raise BadInput(f'method.name = "{config.method.name}" returned {type(method).__name__}: expected a function that returns a Method')
    method = _with_inner(method, config)
    return Job(config, fleet, method, layout, flops, charge)


def _spec(config: Config) -> tuple[Any, int]:
    spec = config.model.config or config.model.preset
    return spec, config.data.vocab_size if config.data.tokenizer == "bpe" else 257


def _plan(config: Config, fleet: Fleet, flops_per_token: float) -> Plan:
    p = config.plan
    if (p.name or DEFAULT_PLAN.get(config.method.name, "uniform")) == "uniform":
        return uniform(fleet.n, p.steps, p.batch, p.sequence)
    return proportional(fleet.speeds(p.batch, p.sequence, flops_per_token), p.steps, p.batch, p.sequence)


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

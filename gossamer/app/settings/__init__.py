"""Every setting of a run: the sections of a configuration file, their defaults and limits.

Larger sections have files of their own beside this one. A setting is read by somebody or it is not here. `gossamer.app.config` loads,
prints and compares these; its messages quote the descriptions below.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator

from gossamer.app.settings.base import Section
from gossamer.app.settings.checkpoint import CheckpointSection
from gossamer.app.settings.data import DataSection
from gossamer.app.settings.log import LogSection
from gossamer.app.settings.model import ModelSection
from gossamer.app.wording import nearest
from gossamer.core.errors import BadInput
from gossamer.core.fleet import MAX_WORKERS

METHODS = ("ddp", "local_sgd", "diloco", "streaming_diloco", "gasloc", "dadam", "local_dadam", "geomesh", "noloco", "sparse_loco", "halos")
"""Names that `[method] name` knows; the keys of `gossamer.recipes.REGISTRY`, repeated here so that reading a file loads no torch."""

Scalar: TypeAlias = bool | int | float | str
Option: TypeAlias = Scalar | list[Scalar | list[Scalar]]

DEFAULT_ROUNDS = 20
MAX_ROUNDS = 2**28 - 1
"""As `gossamer.core.method` has it, for the same reason repeated here."""


def _no_value(data: Any, key: str = "") -> str | None:
    """What is wrong with the first value that cannot be anything: a text that is not UTF-8 (bytes of a command line that are none come as
    halves of surrogate pairs), or a whole number so long that a product of a few has no floating-point neighbour."""
    if isinstance(data, str) and not data.isascii() and data.encode("utf-8", errors="ignore").decode("utf-8") != data:
        return f"{ascii(key)[1:-1]} holds bytes that are not UTF-8 text: give a name or path that is"
    if isinstance(data, int) and data.bit_length() > 256:
        return f"{key} is a number of {data.bit_length()} bits: expected one of at most 256"
    items = data.items() if isinstance(data, dict) else enumerate(data, 1) if isinstance(data, list) else ()
    inner = (_no_value(part, f"{key}.{name}".removeprefix(".")) for name, value in items for part in (name, value))
    return next((fault for fault in inner if fault), None)


class MethodSection(Section):
    """Which method, and its own options: any other key of this table is an argument of the method's recipe."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Option] = Field(init=False)

    name: str = Field(default="geomesh", description="the method, or the dotted path of a recipe of your own, such as mymodule.my_recipe")

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options, as written: `gossamer.app.options.check_options` compares them with the recipe."""
        return dict(self.__pydantic_extra__)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS and "." not in name:
            near = nearest(name, METHODS)
            raise BadInput(
                f'method.name = "{name}" is not a method'
                + (f'; did you mean "{near}"?' if near else ".")
                + f" Known: {', '.join(METHODS)}. A recipe of your own goes by dotted path, such as mymodule.my_recipe"
            )
        return name


class InnerSection(Section):
    """The optimizer of the inner steps. What is left out is the default of the method (or of the optimizer named here)."""

    name: Literal["", "adamw", "lion", "muon", "sgd"] = Field(default="", description="inner optimizer; empty: the method's own")
    lr: float | None = Field(default=None, gt=0, description="peak learning rate of the inner steps")
    clip: float | None = Field(default=None, ge=0, description="largest global gradient norm of an inner step; 0: no clipping")
    weight_decay: float | None = Field(default=None, ge=0, description="decoupled weight decay of the inner steps")

    def given(self) -> dict[str, float | None]:
        """The fields of the optimizer that were set, as it takes them: no clipping is None there."""
        said = self.model_dump(exclude={"name"}, exclude_none=True)
        return {key: None if key == "clip" and value == 0 else value for key, value in said.items()}


class ScheduleSection(Section):
    """The inner learning rate over the run, a function of planned global tokens. What is left out is the schedule's own default."""

    name: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine", description="cosine: warm-up and half a cosine; wsd: warm-up, stable, decay; constant: the peak throughout"
    )
    warmup: float | None = Field(default=None, ge=0, lt=1, description="share of the run's tokens over which the learning rate rises")
    start: float | None = Field(default=None, ge=0, le=1, description="learning rate at the first token, as a share of the peak")
    floor: float | None = Field(default=None, ge=0, le=1, description="learning rate at the last token, as a share of the peak")
    decay: float | None = Field(default=None, ge=0, le=1, description="wsd: share of the run's tokens over which the learning rate falls")

    def given(self) -> dict[str, float]:
        """The fields of the schedule that were set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class PlanSection(Section):
    """How much each worker does in a round."""

    name: Literal["", "uniform", "proportional", "awb"] = Field(
        default="",
        description="uniform: all alike; proportional: H by speed, so that all finish together; awb: B by memory and knee, H by speed and "
        "link; empty: the method's own",
    )
    steps: int = Field(default=30, ge=1, description="inner steps in a round, H; their mean over the workers unless uniform")
    batch: int = Field(default=8, ge=1, description="sequences per inner step, B; where a worker's memory holds less, awb takes less")
    sequence: int = Field(default=128, ge=2, description="tokens per sequence, L")
    batch_max: int | None = Field(
        default=None, ge=1, description="awb: the most sequences per inner step, for workers that are faster with more; none: plan.batch"
    )
    knee: float = Field(default=0.95, gt=0, le=1, description="awb: B is the smallest with this share of the best tokens per second")
    headroom: float = Field(default=0.1, ge=0, lt=1, description="share of a worker's memory to keep free")
    fit: bool = Field(default=True, description="awb: no more sequences than memory holds at once; false: as asked for, in parts")
    carry: bool = Field(
        default=False, description="awb: carry what is left of a step from round to round, so that H is balanced exactly in the mean"
    )
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="sequences per forward and backward pass, whose gradients add up to those of B; none: B, or what is known to fit",
    )

    @model_validator(mode="after")
    def _room(self) -> PlanSection:
        if self.batch_max is not None and self.batch_max < self.batch:
            raise BadInput(f"plan.batch_max = {self.batch_max} is below plan.batch = {self.batch}: raise it, or lower plan.batch")
        if self.carry and self.name != "awb":
            raise BadInput(f'plan.carry = true balances whole steps over rounds, and plan.name = "{self.name}": set plan.name = "awb"')
        return self


class EvalSection(Section):
    """Held-out loss. It costs no virtual time."""

    every: int = Field(default=1, ge=0, description="rounds between evaluations; 0: only at the end")
    sequences: int = Field(default=64, ge=1, le=10_000_000, description="held-out sequences per evaluation")
    batch: int = Field(default=16, ge=1, description="sequences per forward pass of an evaluation")
    workers: bool = Field(default=False, description="gossip in the simulator: evaluate every worker's own parameters too, every time")
    target_perplexity: float | None = Field(
        default=None, gt=1, description="the perplexity whose time is measured; a perplexity is exp(loss) and never reaches 1"
    )


class FleetSection(Section):
    """The workers and the links between them."""

    name: str = Field(default="azure-4", description='a built-in fleet, "uniform", or a TOML file of your own')
    workers: int | None = Field(default=None, ge=1, le=MAX_WORKERS, description='number of workers of the "uniform" fleet')


class ClockSection(Section):
    """The simulator's virtual time, and pacing in real runs."""

    noise: float = Field(default=0.03, ge=0, lt=1, description="spread of step times, relative, lognormal")
    drift: float = Field(default=0.05, ge=0, lt=1, description="slow drift of a worker's speed, relative")
    charge_as: str = Field(default="", description="model preset whose compute and bytes are charged to the clock; empty: the one trained")
    charge_tokens: int = Field(default=0, ge=0, description="tokens of an average inner step as charged to the clock; 0: those trained on")
    codec_gbytes_per_s: float = Field(
        default=20.0, ge=1e-12, description="how fast encoding, decoding and outer steps pass over their float32 bytes"
    )
    sharing: Literal["queue", "fair"] = Field(default="queue", description="how flows share a link: one after another, or max-min fair")
    pace_s: float = Field(
        default=0.0, ge=0, le=86_400, description="real runs: seconds an inner step of the fastest worker takes; 0: as fast as it goes"
    )
    slow_worker: int = Field(default=-1, ge=-1, lt=MAX_WORKERS, description="the worker that slows down in the middle of the run; -1: none")
    slow_factor: float = Field(default=2.0, gt=0, le=1e6, description="how many times as long its inner steps take from then on")
    slow_at: float = Field(default=0.5, ge=0, lt=1, description="share of the run's rounds after which it slows down")
    kill: list[list[int]] = Field(
        default=[], description="pairs [worker, round]: it dies when it has completed so many rounds; 0, simulated: is never there"
    )
    back: list[list[int]] = Field(
        default=[], description="simulated runs: pairs [worker, round]; dead, it comes back when the first worker has completed so many"
    )


class RunSection(Section):
    """How long, where and on what."""

    rounds: int | None = Field(
        default=None, ge=1, le=MAX_ROUNDS, description=f"length of the run in rounds; {DEFAULT_ROUNDS} when tokens is left out too"
    )
    tokens: int | None = Field(default=None, ge=1, description="length of the run in tokens of all workers, instead of rounds")
    out: str = Field(default="", description="folder of the run; empty: runs/ with a name made of the method and the time")
    threads_per_worker: int = Field(default=1, ge=1, le=1024, description="CPU threads of each worker; another number gives other bits")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the model is; auto: a GPU where there is one")
    offload: bool = Field(
        default=False, description="keep anchors, outer state and residuals in the host's memory, and take the outer steps there"
    )
    on_death: Literal["auto", "stop", "continue"] = Field(
        default="auto", description="when a worker dies: stop all, or continue without it (gossip); auto: continue where the method can"
    )
    ahead: int = Field(
        default=0,
        ge=0,
        description="most rounds that a worker may be ahead of the slowest; 0: as many as the graphs let it, told to nobody",
    )
    deadline_s: float = Field(
        default=0.0, ge=0, le=86_400, description="gossip: seconds of waiting after which an exchange is skipped by both sides; 0: none"
    )

    @model_validator(mode="before")
    @classmethod
    def _length(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("rounds") is not None and data.get("tokens") is not None:
            raise BadInput(
                f"run.rounds = {data['rounds']} and run.tokens = {data['tokens']} both give the length of the run: remove one of them"
            )
        if data.get("rounds") is None and data.get("tokens") is None:
            return {**data, "rounds": DEFAULT_ROUNDS}
        return data


class WanSection(Section):
    """Sites on the internet (`gossamer wan join`). It is no part of the hash of the configuration: the coordinator compares it by name."""

    run: str = Field(default="", description="id of the run at the coordinator; empty: the label of the run")
    sites: list[str] = Field(default=[], description="ids of the sites, in the order of the fleet's workers; none: in the order of joining")
    min_sites: int = Field(default=2, ge=1, le=MAX_WORKERS, description="with fewer sites nobody trains: the run waits")
    founders: int | None = Field(default=None, ge=1, le=MAX_WORKERS, description="so many sites begin the run; none: all of the fleet")
    alone: bool = Field(default=False, description="a single site may go on by itself: min_sites = 1 is meant")
    quorum: Literal["all", "deadline"] = Field(
        default="all", description="synchronous methods: wait for every living site, or go on without one that is past the deadline"
    )
    late: Literal["drop", "keep"] = Field(
        default="drop",
        description="what a left-out site does with its drift (synchronous, without overlap): lets it go, or adds it to its next",
    )
    without: Literal["auto", "elect", "wait", "go_on"] = Field(
        default="auto",
        description="while the coordinator is away, the lowest living site decides (elect; gossip: go_on), or all wait; auto: it decides",
    )
    deadline_s: float = Field(
        default=30.0, gt=0, le=1e6, description="the least deadline of a round, seconds; all other time-outs derive from it"
    )
    spread: float = Field(default=6.0, ge=0, le=1e3, description="the deadline is the median arrival and so many deviations")
    lease_s: float | None = Field(default=None, gt=0, le=1e6, description="a site not heard of for so long is out; none: derived")
    inner: Literal["fresh", "donor"] = Field(
        default="fresh", description="inner optimizer of a site that takes another's state: begins afresh, or is the donor's"
    )
    channels: int = Field(default=4, ge=1, le=16, description="data connections between two sites")


class Config(Section):
    """The whole configuration of a run. Its defaults alone are a run: GeoMesh on four simulated regions."""

    name: str = Field(default="", description="a label for tables and figures; empty: the method's name")
    seed: int = Field(default=0, ge=0, description="of initial parameters, data order, peers and simulated noise")
    method: MethodSection = MethodSection()
    inner: InnerSection = InnerSection()
    schedule: ScheduleSection = ScheduleSection()
    plan: PlanSection = PlanSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    eval: EvalSection = EvalSection()
    fleet: FleetSection = FleetSection()
    clock: ClockSection = ClockSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()
    log: LogSection = LogSection()
    wan: WanSection = WanSection()

    @model_validator(mode="before")
    @classmethod
    def _values(cls, data: Any) -> Any:
        try:
            fault = _no_value(data)
        except RecursionError:
            fault = "tables in tables, too many to follow: expected sections and their keys"
        if fault is not None:
            raise BadInput(fault)
        return data

"""A method is a composition of parts, checked once.

    diloco    inner AdamW x uniform plan x complete graph x fp32 x Nesterov on the drift x end of the round
    geomesh   inner Lion  x unequal plan x complete graph x sign x Nesterov on the drift x end of the round
    gasloc    inner AdamW x any plan     x random peers   x fp32 x outer step on the mixed parameters

Recipes (gossamer.recipes) return methods; a variant is `dataclasses.replace` of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from gossamer.core.cadence import Cadence
from gossamer.core.codec import Fp32
from gossamer.core.codec.base import Codec, Format
from gossamer.core.codec.pair import PairCodec
from gossamer.core.errors import BadInput
from gossamer.core.exchange import Exchange, Gather, Hub, Ring, Shard
from gossamer.core.feedback import Feedback
from gossamer.core.guard import Guard
from gossamer.core.inner import Inner
from gossamer.core.outer import Outer
from gossamer.core.plan import Plan
from gossamer.core.replan import Replan
from gossamer.core.schedule import Schedule
from gossamer.core.tiers import Tiers
from gossamer.core.topology import Complete, Topology

Weights: TypeAlias = Literal["uniform", "tokens", "mixing"]

MAX_ROUNDS = 2**28 - 1
"""The round is part of a message's tag, which has 31 bits."""
MAX_TOKENS = 2**32 - 1
"""The tokens of a round are part of a packet's header, which has 32 bits for them."""


@dataclass(frozen=True)
class Method:
    """What every worker of a run agrees on.

    Raises:
        BadInput: the parts cannot work together; the message says which and what to change.
    """

    name: str
    inner: Inner
    schedule: Schedule
    plan: Plan
    topology: Topology
    outer: Outer
    rounds: int
    exchange: Exchange = field(default_factory=Gather)
    codec: Codec = field(default_factory=Fp32)
    pair: PairCodec | None = None
    """How parameters are said in gossip, decoded against the receiver's own. None: as `codec` has it, which otherwise only says what the
    pair codec cannot."""
    feedback: Feedback | None = None
    weights: Weights = "mixing"
    """Of the mean: `uniform` or `tokens` over the contributions received (synchronous methods), `mixing` for the row of W (gossip)."""
    cadence: Cadence = field(default_factory=Cadence)
    guard: Guard = field(default_factory=Guard)
    reset_inner: bool = False
    """Forget the inner optimizer's state after each outer step. It stays with the worker by default."""
    sync_from: int | None = None
    """Start everybody from this worker's parameters. None: all must start equal, and a difference is refused."""
    replan: Replan | None = None
    """When to plan the work anew from measured step times. None: `plan` holds to the end."""
    tiers: Tiers | None = None
    """Servers between the workers, who then never talk to each other: an asynchronous method. None: workers are each other's peers."""
    deadline_s: float | None = None
    """Gossip: an exchange that has not taken place after so many seconds of waiting is skipped by both sides. None: it is waited for."""
    since: tuple[int, int] = (0, 0)
    """(round, planned tokens of all rounds before it) from which on the run has these workers: those before may have been others."""

    @property
    def n(self) -> int:
        """Workers."""
        return self.topology.n

    @property
    def synchronous(self) -> bool:
        """True when all replicas hear the same mean, so that their anchors stay equal bit for bit."""
        return self.weights != "mixing" and self.tiers is None

    @property
    def outlives(self) -> bool:
        """Whether it can go on without a worker: gossip in which whom one hears is who hears one, so that an exchange can be skipped by
        both of its sides and the mean of the others stays."""
        return self.weights == "mixing" and self.tiers is None and self.topology.at(0).is_symmetric

    @property
    def wire(self) -> Format:
        """What the packets of a round hold."""
        return self.pair or self.codec

    @property
    def heard_by(self) -> int:
        """How many hear the payload of a worker in a round."""
        if self.tiers:
            return 1
        return len(self.topology.at(0).out(0)) if isinstance(self.exchange, Gather) else self.n - 1

    @property
    def total_tokens(self) -> int:
        """Planned tokens of the whole run: what the schedule runs over."""
        round, tokens = self.since
        return tokens + (self.rounds - round) * self.plan.usual_tokens

    def resumed(self, round: int, tokens: int, total: int) -> Method:
        """The rest of a run of `total` planned tokens, of which other workers have done `tokens` in `round` rounds: as many rounds more as
        it takes, at least one."""
        return replace(self, rounds=round + max(1, self.plan.rounds_of(total - tokens)), since=(round, tokens))

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise BadInput(f"rounds is {self.rounds}; a run has at least 1, and at most {MAX_ROUNDS} (2^28 - 1)")
        if self.plan.tokens_per_round > MAX_TOKENS:
            raise BadInput(
                f"a round of {self.plan.tokens_per_round} tokens is longer than a packet can say, {MAX_TOKENS} (2^32 - 1): "
                "take fewer steps a round"
            )
        if self.plan.n != self.n:
            raise BadInput(f"the plan is for {self.plan.n} workers and the topology for {self.n}: make them equal")
        if self.sync_from is not None and not 0 <= self.sync_from < self.n:
            raise BadInput(f"sync_from names worker {self.sync_from}, but workers are 0 to {self.n - 1}")
        self._check_codec()
        if self.pair:
            self._check_pair(self.pair)
        if self.tiers:
            self._check_tiers(self.tiers)
        else:
            self._check_mean()
        self._check_cadence()
        self._check_replan()
        if self.deadline_s is not None and self.cadence.fragments > 1:
            raise BadInput("a deadline is for exchanges of the whole model: set cadence fragments to 1, or leave the deadline out")
        if self.deadline_s is not None and not (self.deadline_s > 0.0 and self.outlives):
            raise BadInput(
                f"a deadline of {self.deadline_s:g} s for the exchanges of {self.name}: expected more than 0, and a gossip method in which "
                "whom a worker hears is who hears it (one_peer, two_peer, ring); leave it out"
            )

    def _check_codec(self) -> None:
        name = type(self.codec).__name__.lower()
        if self.codec.lossy and self.outer.says == "parameters":
            raise BadInput(
                f"codec {name} loses bits, and {self.name} exchanges parameters, where that adds up: use codec fp32, "
                "a pair codec (gasloc: codec mod8 to mod1 or signs), or a method that exchanges drifts (diloco, geomesh, sparse_loco)"
            )
        if self.feedback and not self.codec.lossy:
            raise BadInput(f"error feedback has nothing to feed back with the lossless codec {name}: leave it out, or use a lossy codec")

    def _check_pair(self, pair: PairCodec) -> None:
        for faulty, what in (
            (self.outer.says != "parameters", f"an outer rule that says {self.outer.says}, which is small itself: use codec int8 or sign"),
            (self.weights != "mixing", f"weights {self.weights!r}: it is for gossip, so use weights 'mixing'"),
            (not isinstance(self.exchange, Gather), f"exchange {type(self.exchange).__name__.lower()}: use gather"),
            (self.codec.lossy, "a lossy codec beside it, in which goes what it cannot say: use codec fp32"),
            (self.feedback is not None, "error feedback, since nothing is dropped that the worker does not keep: leave feedback out"),
            (pair.of_drift and self.outer.before, "an outer rule that speaks before the inner steps, of which it tells: use gasloc"),
            (
                not self.topology.at(0).is_symmetric,
                f"topology {type(self.topology).__name__}, where a difference is not mixed at both ends: use two_peer or one_peer",
            ),
        ):
            if faulty:
                raise BadInput(f"{self.name} says parameters by a pair codec (mod8 to mod1, signs), which does not go with {what}")

    def _check_mean(self) -> None:
        complete = isinstance(self.topology, Complete)
        if self.synchronous and not complete:
            raise BadInput(
                f"a mean weighted by {self.weights!r} is over all workers, but the topology is {type(self.topology).__name__}: "
                "use the complete topology, or weights 'mixing'"
            )
        if not isinstance(self.exchange, Gather) and not (complete and self.synchronous):
            raise BadInput(
                f"exchange {type(self.exchange).__name__.lower()} needs the complete topology and uniform or token weights: use gather"
            )
        if isinstance(self.exchange, Hub) and not 0 <= self.exchange.at < self.n:
            raise BadInput(f"the hub is worker {self.exchange.at}, but workers are 0 to {self.n - 1}: name one of them")
        if self.feedback and self.feedback.at_mean and not isinstance(self.exchange, Shard):
            raise BadInput(
                "error feedback at the mean is for an exchange that encodes the mean again, which "
                f"{type(self.exchange).__name__.lower()} does not: use exchange shard, or error feedback at the worker"
            )
        if isinstance(self.exchange, Ring) and self.codec.lossy:
            raise BadInput(f"a ring adds payloads on the way, and codec {type(self.codec).__name__.lower()} is lossy: use gather or shard")
        if not self.synchronous and not self.topology.at(0).is_doubly_stochastic():
            raise BadInput(f"the columns of the mixing matrix of {self.topology} do not sum to 1, so gossip would drift from the mean")
        if self.outer.says == "gradient":
            if any(h != 1 for h in self.plan.steps):
                raise BadInput(f"{self.name} exchanges every gradient, so a round is 1 inner step: set plan steps = 1")
            if not self.synchronous:
                raise BadInput(
                    f"{self.name} exchanges gradients of one shared model: use uniform or token weights on the complete topology"
                )

    def _check_tiers(self, tiers: Tiers) -> None:
        if tiers.n != self.n:
            raise BadInput(f"the tiers are of {tiers.n} workers and the plan is for {self.n}: make them equal")
        for faulty, what in (
            (self.codec.lossy, "a lossy codec (servers send parameters): use codec fp32"),
            (self.outer.says != "drift", f"an outer rule that says {self.outer.says} (servers take drifts): use OuterSGD"),
            (self.cadence != Cadence(), "overlap or fragments (workers start from what the server has answered): leave cadence out"),
            (not isinstance(self.exchange, Gather), "an exchange between the workers, who never talk to each other: use gather"),
            (self.weights != "uniform", f"weights {self.weights!r} (each arrival counts as it is): use uniform"),
            (self.sync_from is not None, "sync_from: start all from equal parameters"),
            (self.replan is not None, "re-planning: the blocks of the workers already follow their speeds; set replan to 0"),
        ):
            if faulty:
                raise BadInput(f"{self.name} has servers, which do not go with {what}")

    def _check_cadence(self) -> None:
        if self.cadence.overlap:
            if isinstance(self.exchange, Ring):
                raise BadInput("a ring needs its workers between the hops, so it cannot travel under inner steps: use gather or shard")
            if self.outer.before:
                raise BadInput(f"{self.name} already says its part before the inner steps: set cadence overlap to 0")
            if self.outer.says == "gradient":
                raise BadInput(f"{self.name} has no later round to land in: set cadence overlap to 0")
        if self.cadence.eager and self.outer.says != "drift":
            raise BadInput(f"eager steps ahead on the worker's own drift, and {self.name} says {self.outer.says}: leave eager out")
        if self.cadence.fragments > 1 and (self.outer.before or self.outer.says == "gradient"):
            raise BadInput(f"{self.name} has nothing to say in the middle of a round: set cadence fragments to 1")

    def _check_replan(self) -> None:
        if self.replan is None:
            return
        if not self.synchronous or isinstance(self.exchange, Ring):
            raise BadInput(
                f"re-planning needs every worker to hear every other's step time each round, which {self.name} with "
                f"{'gossip' if not self.synchronous else 'a ring'} does not: use exchange gather or shard with uniform or token weights, "
                "or set replan to 0"
            )
        if self.outer.says == "gradient":
            raise BadInput(f"{self.name} takes one step a round, so there is nothing to plan anew: set replan to 0")
        if self.replan.unhidden_s and len(self.replan.unhidden_s) != self.n:
            raise BadInput(f"re-planning has {len(self.replan.unhidden_s)} exchange times for {self.n} workers: give one each, or none")

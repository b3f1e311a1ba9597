"""What a worker may ask of its world, and what the world answers.

A worker is a generator that yields effects and is sent replies; it never touches a clock, a socket, a process group or a global. Three
worlds answer the same program: the simulator's virtual clock, torch.distributed, and a wide-area transport.

    def worker():                       # the smallest program: train alone
        done = yield Compute(work)
        yield Load(outer(done.tree))
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from gossamer.core.codec.base import Format
from gossamer.core.tree import Layout, Tree

if TYPE_CHECKING:
    from gossamer.worker.packet import Packet
    from gossamer.worker.state import State

Addr: TypeAlias = int
"""A seat. The fleet maps a seat to (site, rank)."""

SpanKind: TypeAlias = Literal["encode", "decode", "outer"]


class Tag:
    """Message tags: round * 8 + kind, below 2^31. Messages of one tag between one pair arrive in the order sent."""

    SAY, MEAN, REDUCE, SPREAD, SYNC, TIER = range(6)

    @staticmethod
    def of(round: int, kind: int) -> int:
        """The tag of `kind` in `round`."""
        return round * 8 + kind


class Work(NamedTuple):
    """One stretch of inner steps."""

    steps: int
    """Inner steps to take."""
    batch: int
    """Sequences per step."""
    tokens0: float
    """Planned global tokens before the first of these steps: where the schedule stands."""
    tokens_per_step: float
    """Planned global tokens that one of these steps stands for."""
    kind: Literal["steps", "grad", "apply"] = "steps"
    """`steps`: inner steps. `grad`: the mean gradient of one batch, no step. `apply`: one optimizer step on `tree`, no batch."""
    tree: Tree | None = None


class Done(NamedTuple):
    """The reply to Compute."""

    tree: Tree | None
    """Live views of the parameters (of the gradients for `grad`), valid until the next Compute, or Load of the same names. None in
    timing-only runs."""
    tokens: int
    """Tokens really consumed."""
    loss_sum: float
    """Sum over those tokens of the loss in nats."""
    seconds: float = 0.0
    """What the stretch took, pacing included. A body leaves it at 0, and the world fills in what it measured (simulator: what it charged);
    a body that knows better says so."""


class Compute(NamedTuple):
    """Do inner steps. Reply: Done."""

    work: Work


class Load(NamedTuple):
    """Set the parameters that `tree` names, cast to their own dtype. No reply."""

    tree: Tree
    reset_inner: bool = False
    """Forget the inner optimizer's state (after a refused, non-finite drift)."""


class Content(NamedTuple):
    """What a payload holds: parts of a tree, each written by `format`, one after the other. Only a program whose worker has several ranks
    asks (gossamer.worker.ranks)."""

    layout: Layout
    """What this rank holds of it."""
    whole: Layout
    """What all ranks of the worker hold of it together."""
    format: Format


class Expect(NamedTuple):
    """Messages that will come, with exact sizes: the world posts its receives now, so that data flows under the compute. No reply."""

    tag: int
    sizes: Mapping[Addr, int]
    contents: Mapping[Addr, Content] | None = None


class Ready(NamedTuple):
    """This worker's compute of the round (what `fragment` carries of it) is done: tells those who will wait for data that carries it.
    What separates straggler idle from network idle. Costs nothing in the simulator; a small note in real worlds. No reply."""

    to: Sequence[Addr]
    round: int
    fragment: int = 0


class Send(NamedTuple):
    """Hand a packet over. Never blocks; the packet is immutable and the world keeps it until drained. No reply."""

    to: Sequence[Addr]
    tag: int
    packet: Packet
    content: Content | None = None


class Gather(NamedTuple):
    """ONE wait for all messages of `tag` from `frm`. Reply: dict Addr -> Packet; an absent key is a peer that is dead, or past the
    deadline."""

    tag: int
    frm: Sequence[Addr]
    round: int
    """The round whose READY notes judge the wait."""
    carries: Mapping[Addr, Sequence[Addr]] | None = None
    """Whose compute each awaited message carries; None: its sender's alone."""
    fragment: int = 0
    """The fragment whose READY notes judge the wait."""
    deadline_s: float | None = None
    """After so many seconds of waiting, an exchange that has not taken place is skipped, by both of its sides: each of them has an absent
    key. For exchanges in which whom one hears is who hears one. None: as long as the peer lives."""


class RecvAny(NamedTuple):
    """Wait for whatever message of `tag` comes first, from anybody. Servers only; it needs no Expect. Reply: (Addr, Packet), or
    (Addr, None) for a sender that is dead and from which nothing more will come."""

    tag: int
    frm: Sequence[Addr] = ()
    """Who may send; the simulator takes what comes."""
    nbytes: int = 0
    """Bytes of a message, which may also be a header alone; the simulator takes what comes."""


class SiteSum(NamedTuple):
    """Sum of a float64 tensor over the ranks of the site; the identity at one rank. Reply: Tensor."""

    value: Tensor


class Span(NamedTuple):
    """What the time since the last effect was spent on (real worlds), or `nbytes` to charge for it (simulator). No reply."""

    kind: SpanKind
    nbytes: int


class Boundary(NamedTuple):
    """A round is complete and `state` is whole. Checkpoints, evaluation, membership and clean stops live here and only here.
    Reply: Go or Stop."""

    round: int
    """Rounds completed."""
    state: State


class Go(NamedTuple):
    """Carry on."""

    absent: frozenset[Addr] | None = None
    """Who is left out from the round that begins on; None: nothing has changed. The same on all workers at one boundary."""
    welcome: tuple[Addr, ...] = ()
    """Who comes back with the round that begins, and takes this worker's state; nobody where nothing has changed."""


class Stop(NamedTuple):
    """End cleanly at this boundary."""

    over: bool = False
    """For good, as if it were the last round: what is in flight lands. False: the run may be gone on with, and that is kept."""


class Note(NamedTuple):
    """A record for the metrics; the world adds time and bytes. No reply."""

    record: dict[str, Any]


Effect: TypeAlias = Compute | Load | Expect | Ready | Send | Gather | RecvAny | SiteSum | Span | Boundary | Note
Reply: TypeAlias = Any
Program: TypeAlias = Generator[Effect, Reply, "State"]


class Body(Protocol):
    """What does a worker's inner steps: a model, its inner optimizer and its data."""

    def compute(self, work: Work) -> Done:
        """Takes the steps of `work`."""

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        """Sets the parameters that `tree` names."""

    def state(self) -> dict[str, Any]:
        """Inner optimizer state, data cursor and counters, as a flat dict: tensors by name, and plain numbers."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""

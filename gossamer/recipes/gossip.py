"""Gossip: every round, each worker mixes with a few others, and waits for nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gossamer.core.codec.modulo import Modulo
from gossamer.core.codec.pair import PairCodec
from gossamer.core.codec.signs_and_slice import SignsAndSlice
from gossamer.core.consensus import rate
from gossamer.core.errors import BadInput
from gossamer.core.matching import Preferred
from gossamer.core.method import Method
from gossamer.core.outer import CombineWhileAdapt, Form, Gossip
from gossamer.core.topology import Topology
from gossamer.core.topology import topology as topology_by_name
from gossamer.recipes.setting import ADAMW, Setting

TopologyName = Literal["ring", "complete", "one_peer", "two_peer", "one_peer_exp"]
ModuloName = Literal["fp32", "mod8", "mod4", "mod2", "mod1"]
PairName = Literal["fp32", "mod8", "mod4", "mod2", "mod1", "signs"]

SLICES = 4


def _pair(codec: PairName, slices: int = SLICES) -> PairCodec | None:
    """None for fp32."""
    if codec != "signs" and slices != SLICES:
        raise BadInput(f"slices = {slices} belongs to codec signs, not {codec}: leave it out")
    if codec == "signs":
        return SignsAndSlice(slices)
    return None if codec == "fp32" else Modulo(int(codec.removeprefix("mod")))


def gasloc(
    setting: Setting,
    *,
    topology: TopologyName = "two_peer",
    momentum: Form = "outer",
    outer_lr: float = 0.8,
    outer_momentum: float = 0.7,
    nesterov: bool = True,
    alpha: float = 1.0,
    perfect: bool = False,
    codec: PairName = "fp32",
    slices: int = SLICES,
    prefer: float = 0.0,
    force: bool = False,
) -> Method:
    """GASLoC (Cagnasso, Belilovsky and Oyallon 2026): gossip on z = x + lr * g with an outer optimizer; see `Gossip` for the three forms
    of `momentum`. Sends 4 P bytes to each of one or two random peers a round.

    `perfect` refuses an odd number of workers with one_peer, where one would sit out each round. With `prefer` above 0 the random peers
    are drawn by link, in proportion to rate^prefer (`gossamer.core.matching`); 0 is the uniform law, bit for bit. A choice of parameters
    under which the workers drift apart (mean-square consensus rate of 1 or more) is refused, unless `force`.

    `codec`: fp32, or mod8 to mod1 for so many bits a number modulo a range (`Modulo`), or signs for signs of the drift and one of `slices`
    slices of the parameters a round (`SignsAndSlice`); all keep the mean over workers.
    """
    outer = Gossip(outer_lr, outer_momentum, momentum, nesterov)
    graph = graph_of(setting, topology, alpha=alpha, perfect=perfect, prefer=prefer)
    if setting.n > 1 and not force:
        r = rate(momentum, graph, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        if r >= 1.0:
            raise BadInput(
                f"the workers would drift apart: momentum form {momentum!r} on {topology} with outer_lr {outer_lr}, outer_momentum "
                f"{outer_momentum}, alpha {alpha}{f', prefer {prefer}' if prefer else ''} has a mean-square consensus rate of {r:.3f} a "
                "round, and it must be below 1: lower outer_momentum or outer_lr, or pass force=true"
            )
    return Method(
        name="gasloc",
        inner=setting.inner_or(ADAMW),
        schedule=setting.schedule,
        plan=setting.plan,
        topology=graph,
        outer=outer,
        rounds=setting.rounds,
        pair=_pair(codec, slices),
        weights="mixing",
    )


def graph_of(setting: Setting, name: str, *, alpha: float = 1.0, perfect: bool = False, prefer: float = 0.0) -> Topology:
    """A topology by name among the workers of `setting`; with `prefer` above 0 one_peer and two_peer draw peers by link.

    Raises:
        BadInput: a fixed topology with `prefer`, or link rates that are not known.
    """
    plain = topology_by_name(name, setting.n, seed=setting.seed, alpha=alpha, perfect=perfect)
    if not prefer or setting.n < 2:
        return plain
    if name not in ("one_peer", "two_peer"):
        raise BadInput(f"prefer = {prefer} with topology {name!r}, whose peers are fixed: use one_peer or two_peer, or set prefer to 0")
    if setting.rates is None:
        raise BadInput(f"prefer = {prefer} draws peers by the rates of their links, which this setting does not know: give it rates")
    return Preferred(setting.n, setting.seed, 1 if name == "one_peer" else 2, setting.rates(), prefer, alpha, perfect)


def noloco(setting: Setting, *, outer_lr: float = 0.7, outer_momentum: float = 0.5, force: bool = False) -> Method:
    """NoLoCo (arXiv 2506.10911): x <- (1 - lr) x + lr W(x + g) + momentum (x_t - x_{t-1}) over random pairs, which is GASLoC's outer form
    on one_peer with heavy ball."""
    base = gasloc(
        setting, topology="one_peer", momentum="outer", outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=False, force=force
    )
    return replace(base, name="noloco")


def local_dadam(setting: Setting, *, topology: TopologyName = "ring", alpha: float = 1.0, codec: ModuloName = "fp32") -> Method:
    """Local-DAdam (GASLoC, section 4): x_{t+1} = W x_t + g_t after H inner steps; the mixing travels while they run. `codec`: as in
    gasloc."""
    base = gasloc(setting, topology=topology, alpha=alpha, force=True)
    return replace(base, name="local_dadam", outer=CombineWhileAdapt(), pair=_pair(codec))


def dadam(setting: Setting, *, topology: TopologyName = "ring", alpha: float = 1.0, codec: ModuloName = "fp32") -> Method:
    """DAdam (Wang et al. 2024, arXiv 2410.11998): Local-DAdam with one inner step a round. The setting's rounds times steps give the
    number of rounds."""
    return replace(local_dadam(setting.one_step("dadam"), topology=topology, alpha=alpha, codec=codec), name="dadam")

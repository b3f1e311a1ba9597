"""Gossip: every round, each worker mixes with a few others, and waits for nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast, get_args

from gossamer.core.cadence import Cadence
from gossamer.core.codec.modulo import Modulo
from gossamer.core.codec.pair import PairCodec
from gossamer.core.codec.signs_and_slice import SignsAndSlice
from gossamer.core.consensus import worst_rate
from gossamer.core.errors import BadInput
from gossamer.core.method import Method
from gossamer.core.outer import CombineWhileAdapt, Form, Gossip
from gossamer.core.outer_torch import OuterTorch, TorchName
from gossamer.core.topology import Topology
from gossamer.recipes.graph import Admissible, TopologyName, graph_of
from gossamer.recipes.setting import ADAMW, Setting

ModuloName = Literal["fp32", "mod8", "mod4", "mod2", "mod1"]
PairName = Literal["fp32", "mod8", "mod4", "mod2", "mod1", "signs"]
OuterName = Literal["auto", "nesterov", "heavy_ball", "sgd", "adam", "adamw", "radam", "rmsprop"]

SLICES = 4
BETA2, EPS = 0.99, 1e-8


def _pair(codec: PairName, slices: int = SLICES, rule: Gossip | None = None) -> PairCodec | None:
    """None for fp32. At 2 bits and 1 an outer momentum counts in how much is mixed: it takes a difference, and its noise, lr / (1 -
    momentum) times over the rounds; with more bits there is too little noise for that to help."""
    if codec != "signs" and slices != SLICES:
        raise BadInput(f"slices = {slices} belongs to codec signs, not {codec}: leave it out")
    if codec == "signs":
        return SignsAndSlice(slices)
    if codec == "fp32":
        return None
    bits = int(codec.removeprefix("mod"))
    repeats = rule.lr / (1.0 - rule.momentum) if rule and rule.linear and bits <= 2 else 1.0
    return Modulo(bits, block=512 if bits == 1 else 256, patience=max(1.0, repeats))


def gasloc(
    setting: Setting,
    *,
    topology: TopologyName = "two_peer",
    momentum: Form = "outer",
    outer: OuterName = "auto",
    outer_lr: float = 0.8,
    outer_momentum: float = 0.7,
    nesterov: bool = True,
    outer_beta2: float = BETA2,
    outer_eps: float = EPS,
    outer_decay: float = 0.0,
    alpha: float = 1.0,
    perfect: bool = False,
    admissible: Admissible = "all",
    min_mbps: float = 0.0,
    codec: PairName = "fp32",
    slices: int = SLICES,
    prefer: float = 0.0,
    overlap: float = 0.0,
    average_every: int = 0,
    force: bool = False,
) -> Method:
    """GASLoC (Cagnasso, Belilovsky and Oyallon 2026): gossip on z = x + lr * g with an outer optimizer; see `Gossip` for the three forms
    of `momentum`. Sends 4 P bytes to each of one or two random peers a round.

    `outer`: nesterov, heavy_ball, sgd (without momentum), or an optimizer of torch's (`OuterTorch`, whose b1 is `outer_momentum`); all but
    nesterov and sgd in form "outer" only. auto: nesterov, or heavy_ball where `nesterov` is false. A choice of parameters under which the
    workers drift apart (mean-square consensus rate of 1 or more) is refused, unless `force`; for torch's optimizers, which are not linear
    in the disagreement, no rate is known.

    `perfect` refuses an odd number of workers with one_peer, where one would sit out each round. With `prefer` above 0 the random peers
    are drawn by link, in proportion to rate^prefer (`gossamer.core.matching`); 0 is the uniform law, bit for bit. `admissible` and
    `min_mbps` say who may be peers at all (`gossamer.recipes.graph.admissible_graph`). `average_every`: every so many rounds, a mean over
    all workers (`gossamer.core.averaging`).

    `codec`: fp32, or mod8 to mod1 for so many bits a number modulo a range (`Modulo`), or signs for signs of the drift and one of `slices`
    slices of the parameters a round (`SignsAndSlice`); all keep the mean over workers.

    `overlap`: share of a round's inner steps under which the exchange travels (`Cadence`); 1: the mixing of round t lands at the end of
    round t + 1's block. Without drift the rate of agreement is that without overlap; the worst with drift must be below 1, too
    (`gossamer.core.consensus.worst_rate`).
    """
    rule = _outer(outer, momentum, outer_lr, outer_momentum, nesterov, outer_beta2, outer_eps, outer_decay)
    graph = graph_of(
        setting,
        topology,
        alpha=alpha,
        perfect=perfect,
        prefer=prefer,
        admissible=admissible,
        min_mbps=min_mbps,
        average_every=average_every,
    )
    if setting.n > 1 and not force and rule.linear:
        _check_rate(rule, graph, overlap, f"{topology} with alpha {alpha}{f', prefer {prefer}' if prefer else ''}")
    return Method(
        name="gasloc",
        inner=setting.inner_or(ADAMW),
        schedule=setting.schedule,
        plan=setting.plan,
        topology=graph,
        outer=rule,
        rounds=setting.rounds,
        pair=_pair(codec, slices, rule),
        weights="mixing",
        cadence=Cadence(overlap),
    )


def _outer(outer: OuterName, form: Form, lr: float, momentum: float, nesterov: bool, beta2: float, eps: float, decay: float) -> Gossip:
    """The outer rule of that name.

    Raises:
        BadInput: options that contradict one another, or that the rule does not have.
    """
    if outer == "nesterov" and not nesterov:
        raise BadInput("outer = 'nesterov' with nesterov = false: leave nesterov out")
    if outer in get_args(TorchName):
        return Gossip(lr, momentum, form, rule=OuterTorch(cast(TorchName, outer), lr, momentum, beta2, eps, decay))
    for what, given, default in (("outer_beta2", beta2, BETA2), ("outer_eps", eps, EPS), ("outer_decay", decay, 0.0)):
        if given != default:
            raise BadInput(f"{what} = {given} belongs to outer adam, adamw, radam or rmsprop, not to {outer}: leave it out")
    if outer == "sgd":
        return Gossip(lr, 0.0, form)
    return Gossip(lr, momentum, form, nesterov and outer != "heavy_ball")


def _check_rate(rule: Gossip, graph: Topology, overlap: float, on: str) -> None:
    r = worst_rate(rule.form, graph, lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov, overlap=overlap)
    if r >= 1.0:
        late = f" where overlap {overlap} meets a strong drift" if overlap else ""
        raise BadInput(
            f"the workers would drift apart: momentum form {rule.form!r} on {on}, outer_lr {rule.lr} and outer_momentum {rule.momentum} "
            f"has a mean-square consensus rate of {r:.3f} a round{late}, and it must be below 1: lower outer_momentum or outer_lr, or pass "
            "force=true"
        )


def noloco(setting: Setting, *, outer_lr: float = 0.7, outer_momentum: float = 0.5, force: bool = False) -> Method:
    """NoLoCo (arXiv 2506.10911): x <- (1 - lr) x + lr W(x + g) + momentum (x_t - x_{t-1}) over random pairs, which is GASLoC's outer form
    on one_peer with heavy ball."""
    base = gasloc(
        setting, topology="one_peer", momentum="outer", outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=False, force=force
    )
    return replace(base, name="noloco")


def local_dadam(
    setting: Setting,
    *,
    topology: TopologyName = "ring",
    alpha: float = 1.0,
    admissible: Admissible = "all",
    min_mbps: float = 0.0,
    codec: ModuloName = "fp32",
) -> Method:
    """Local-DAdam (GASLoC, section 4): x_{t+1} = W x_t + g_t after H inner steps; the mixing travels while they run. Options as in
    gasloc."""
    base = gasloc(setting, topology=topology, alpha=alpha, admissible=admissible, min_mbps=min_mbps, force=True)
    return replace(base, name="local_dadam", outer=CombineWhileAdapt(), pair=_pair(codec))


def dadam(
    setting: Setting,
    *,
    topology: TopologyName = "ring",
    alpha: float = 1.0,
    admissible: Admissible = "all",
    min_mbps: float = 0.0,
    codec: ModuloName = "fp32",
) -> Method:
    """DAdam (Wang et al. 2024, arXiv 2410.11998): Local-DAdam with one inner step a round. The setting's rounds times steps give the
    number of rounds."""
    base = local_dadam(setting.one_step("dadam"), topology=topology, alpha=alpha, admissible=admissible, min_mbps=min_mbps, codec=codec)
    return replace(base, name="dadam")

"""Synchronous methods: every round ends with one mean over all workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gossamer.core.cadence import Cadence
from gossamer.core.codec import Bf16, Fp16, Fp32, Int8, Sign, TopK
from gossamer.core.codec.base import Codec
from gossamer.core.errors import BadInput
from gossamer.core.exchange import Exchange, Gather, Hub, Ring, Shard
from gossamer.core.feedback import Feedback
from gossamer.core.inner import Lion
from gossamer.core.matching import Rates
from gossamer.core.method import Method
from gossamer.core.outer import Average, GradientMean, OuterSGD
from gossamer.core.replan import Replan
from gossamer.core.star import best_connected, handed
from gossamer.core.topology import Complete
from gossamer.recipes.setting import ADAMW, Setting

CodecName = Literal["fp32", "fp16", "bf16", "int8", "sign", "topk"]
ExchangeName = Literal["auto", "gather", "shard", "ring", "hub"]
MeanWeights = Literal["uniform", "tokens"]
Correction = Literal["none", "work"]
ErrorFeedback = Literal["none", "worker", "mean", "both"]

_CODECS: dict[str, Codec] = {"fp32": Fp32(), "fp16": Fp16(), "bf16": Bf16(), "int8": Int8(), "sign": Sign(), "topk": TopK()}
_EXCHANGES: dict[str, Exchange] = {"gather": Gather(), "shard": Shard(), "ring": Ring()}


def _exchange(setting: Setting, name: ExchangeName, codec: Codec, hub: int) -> Exchange:
    """`auto` chooses only among routes of equal mathematics: shard where the codec is lossless, else gather."""
    if name == "hub":
        return Hub(_best(setting, codec) if hub == -1 else hub, _rates(setting, named=hub != -1))
    if hub != -1:
        raise BadInput(f'hub = {hub} names the worker in the middle of exchange "hub", and exchange is "{name}": set it, or leave hub out')
    return _EXCHANGES[("gather" if codec.lossy else "shard") if name == "auto" else name]


def _best(setting: Setting, codec: Codec) -> int:
    """The best-connected worker, for what the codec makes of a matrix of a million."""
    if setting.n == 1:
        return 0
    if setting.rates is None:
        raise BadInput("the best-connected worker is found by the fleet's links, and there is no fleet: name the hub")
    return best_connected(setting.rates(), handed(codec, setting.n))


def _rates(setting: Setting, *, named: bool) -> Rates | None:
    """By which another hub is chosen. None: the hub is named, and there is no fleet, or one of too many unlike workers."""
    if setting.rates is None:
        return None
    try:
        return setting.rates()
    except BadInput:
        if not named:
            raise
        return None


def _feedback(at: ErrorFeedback | bool) -> Feedback | None:
    """False is none, True the worker's own end."""
    if at is False or at == "none":
        return None
    return Feedback(ends="worker" if at is True else at)


def diloco(
    setting: Setting,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    weights: MeanWeights = "uniform",
    codec: CodecName = "fp32",
    exchange: ExchangeName = "auto",
    hub: int = -1,
    overlap: float = 0.0,
    eager: bool = False,
    fragments: int = 1,
    replan: float = 0.0,
    replan_smoothing: float = 0.3,
    correction: Correction = "none",
) -> Method:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): D = sum_i w_i (x - y^i), then Nesterov on D.

    Sends 2 (n - 1) / n * 4 P bytes a worker and round. A codec that loses bits goes by `gather`, unless `shard` is asked for. `hub` is the
    worker in the middle of exchange "hub", a star (`gossamer.core.exchange.Hub`); -1: the best-connected by the fleet's links.

    `overlap`, `eager` and `fragments` say when what lands (`Cadence`).
    `replan` is the predicted gain from which the work is planned anew from measured step times (`gossamer.core.replan`), 0 for never.
    `correction="work"` sizes drifts and outer steps for unequal H_i (`gossamer.core.work`).
    """
    return Method(
        name="diloco",
        inner=setting.inner_or(ADAMW),
        schedule=setting.schedule,
        plan=setting.plan,
        topology=Complete(setting.n),
        outer=OuterSGD(outer_lr, outer_momentum, nesterov, correction),
        rounds=setting.rounds,
        exchange=_exchange(setting, exchange, _CODECS[codec], hub),
        codec=_CODECS[codec],
        weights=weights,
        cadence=Cadence(overlap, fragments, eager),
        replan=Replan(replan, replan_smoothing) if replan else None,
    )


def streaming_diloco(
    setting: Setting,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    weights: MeanWeights = "uniform",
    codec: CodecName = "fp32",
    exchange: ExchangeName = "auto",
    hub: int = -1,
    fragments: int = 4,
    overlap: float = 0.25,
) -> Method:
    """Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): DiLoCo by fragments of whole tensors, fragment p launched after
    (p + 1) / F of each round and landing `overlap` of a round later. The bytes of DiLoCo, spread over the round.

    Departures: fragments are consecutive, not strided; on landing the worker's own block is replaced by the agreed one, where the paper
    blends halves; codecs are ours (the paper's has 4 bits).
    """
    base = diloco(
        setting, outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov, weights=weights, codec=codec, exchange=exchange,
        hub=hub, overlap=overlap, fragments=fragments,
    )  # fmt: skip
    return replace(base, name="streaming_diloco")


def local_sgd(setting: Setting, *, weights: MeanWeights = "tokens", exchange: ExchangeName = "auto", hub: int = -1) -> Method:
    """Local SGD, federated averaging (Stich 2019; McMahan et al. 2017): x <- sum_i w_i y^i."""
    return replace(diloco(setting, weights=weights, exchange=exchange, hub=hub), name="local_sgd", outer=Average())


def ddp(setting: Setting, *, exchange: ExchangeName = "auto", hub: int = -1) -> Method:
    """Data parallelism: every step, the inner optimizer acts on the mean gradient, weighted by tokens. A round is one step; the
    setting's rounds times steps give the number of rounds."""
    base = diloco(setting.one_step("ddp"), weights="tokens", exchange=exchange, hub=hub)
    return replace(base, name="ddp", outer=GradientMean())


def geomesh(
    setting: Setting,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    weights: MeanWeights = "tokens",
    codec: CodecName = "sign",
    magnitude: Literal["tensor", "row", "block"] = "tensor",
    embeddings: Literal["row", "same"] = "row",
    error_feedback: ErrorFeedback | bool = "none",
    exchange: ExchangeName = "auto",
    hub: int = -1,
    overlap: float = 0.0,
    eager: bool = False,
    fragments: int = 1,
    replan: float = 0.0,
    replan_smoothing: float = 0.3,
    correction: Correction = "none",
) -> Method:
    """GeoMesh (Shin et al. 2026): B_i and H_i from a plan, Lion inside, and compressed sign synchronisation (CSS): worker i sends one bit
    a parameter, s = [D >= 0], one magnitude a tensor, m = mean|D|, and its token count; everybody forms
    D = sum_i (n_i / sum n) m^i (2 s^i - 1), its own part included as decoded, then Nesterov.

    Sends (n - 1) * P / 8 bytes a worker and round by `gather`. `shard` sends about 2 P / 8 but signs twice: other mathematics, so it is
    asked for by name. Departure from the paper: embeddings and the output layer carry one magnitude a row (`embeddings="same"` for the
    paper's), so that rows no token touched stay where they are. `error_feedback`: at the `worker`, at the `mean` that the owner of a slice
    signs (shard), or `both`. The outer momentum is what learned best in a few trials on this project's
    small model (docs/lab-notes.md); the paper's is not published.
    """
    if codec != "sign" and magnitude != "tensor":
        raise BadInput(f"magnitude {magnitude!r} belongs to codec sign, not {codec}: leave it out")
    base = diloco(
        setting, outer_lr=outer_lr, outer_momentum=outer_momentum, weights=weights, codec=codec, exchange=exchange, hub=hub,
        overlap=overlap, eager=eager, fragments=fragments, replan=replan, replan_smoothing=replan_smoothing, correction=correction,
    )  # fmt: skip
    return replace(
        base,
        name="geomesh",
        inner=setting.inner_or(Lion(lr=1e-3)),
        codec=Sign(magnitude=magnitude, embeddings=embeddings) if codec == "sign" else base.codec,
        feedback=_feedback(error_feedback),
    )


def sparse_loco(
    setting: Setting,
    *,
    outer_lr: float = 1.0,
    decay: float = 0.95,
    share: float = 1 / 32,
    chunk: int = 4096,
    values: Literal["fp32", "fp16", "bf16"] = "bf16",
    exchange: Literal["gather", "hub"] = "gather",
    hub: int = -1,
) -> Method:
    """SparseLoCo (arXiv 2508.15706): e <- decay * e + D; the largest `share` of each chunk is sent; e -= sent; x -= lr * mean(sent).

    No outer momentum: the error feedback plays its part. Departure: values travel as 16-bit numbers, not as 2-bit ones.
    """
    codec = TopK(share=share, chunk=chunk, values=values)
    base = diloco(setting, outer_lr=outer_lr, outer_momentum=0.0, nesterov=False, exchange="gather")
    route = _exchange(setting, exchange, codec, hub)
    return replace(base, name="sparse_loco", codec=codec, exchange=route, feedback=Feedback(decay) if codec.lossy else None)

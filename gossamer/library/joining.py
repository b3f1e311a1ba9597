"""`gossamer.join` and `gossamer.connect`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.fragment import fragments
from gossamer.core.method import Method
from gossamer.core.schedule import Schedule
from gossamer.core.tree import layout_hash, master, numel
from gossamer.library.loop import Loop
from gossamer.library.methods import Amount, MethodLike, method_of
from gossamer.library.outer import Outer
from gossamer.library.saved import Place
from gossamer.net.start import init
from gossamer.real.group import Group
from gossamer.worker.peer import start
from gossamer.worker.seat import Seat

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
              "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
              "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


def connect(*, alone: bool = False, on_lost: Literal["raise", "record"] = "raise", start_timeout_s: float = 600.0) -> Group:
    """Connects this process to the other workers that torchrun (or gossamer's launcher) has started; without a launcher it is one worker.
    The result has `me` and `n`, by which data are divided, and goes to `join` as `workers`.

    Args:
        alone: then take the launcher's variables out of the environment and leave this process one GPU of its machine: libraries that
            look there (transformers' Trainer, Lightning, accelerate) train in this process alone, and wrap nothing. Call it before they
            look, and before CUDA is used.
        on_lost, start_timeout_s: as of `join`.

    Raises:
        BadInput: the environment is incomplete.
        RunFailed: some workers did not come.
    """
    survives = _survives(on_lost)
    group = init(start_timeout_s=start_timeout_s, survives=survives)
    if alone:
        here, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.environ.get("LOCAL_RANK")
        if here > 1 and local is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            listed = [str(k) for k in range(here)] if visible is None else [d for d in visible.split(",") if d]
            if int(local) < len(listed):
                os.environ["CUDA_VISIBLE_DEVICES"] = listed[int(local)]
        for name in _LAUNCHERS:
            os.environ.pop(name, None)
    return group


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: MethodLike,
    *,
    options: Mapping[str, Any] | None = None,
    steps: int | Sequence[int] | None = None,
    batch: int | Sequence[int] | None = None,
    sequence: int | None = None,
    rounds: int | None = None,
    tokens: int | None = None,
    plan: Literal["auto", "uniform", "proportional"] = "auto",
    fleet: str | Fleet | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    sync: str = "check",
    on_lost: Literal["raise", "record"] = "raise",
    workers: Group | None = None,
    start_timeout_s: float = 600.0,
) -> Outer:
    """Joins the other workers of a run with a training loop of one's own:

        outer = gossamer.join(model, optimizer, "diloco", steps=30, batch=8, sequence=512, rounds=200)
        for batch in loader:
            loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step(tokens=batch["input_ids"].numel())
        outer.close()

    Who the workers are comes from torchrun, one process each, over gloo; a process that no launcher has started is a run of one worker.

    Args:
        model: with its first weights, on its device. Its trainable parameters are exchanged, each once; buffers stay as they are.
        optimizer: of the inner steps, or several that step together. Its state stays here; it is cleared only where a contribution of
            this worker was refused as not finite or far too large, or the method says so.
        method: a recipe's name or dotted path, a recipe (with options, by functools.partial), a Method, or a configuration file (.toml).
        options: of a recipe by name, as in `[method]` of a configuration.
        steps, batch, sequence: H_i, B_i and L; one for all workers, or one each. Not with a Method or a file, which have them.
        rounds, tokens: length of the run, as one of the two.
        plan, fleet: work by the speeds of a fleet; default: all alike.
        schedule: of `Outer.scheduler`; default cosine.
        seed: of the peers of random topologies.
        sync: "check": the workers must have equal first parameters; "from:K": all take worker K's, here and now.
        on_lost: "raise": when a worker is gone, `Outer.step` raises PeerLost. "record": the others go on (gossip), and records name it.
        workers: what `connect` has given; default: connect now.
        start_timeout_s: how long to wait for the other workers.

    Raises:
        BadInput: something that was given cannot be; nothing has been sent.
        RunFailed: some workers did not come, or have joined with another method or model; the message names them.
    """
    survives = _survives(on_lost)
    loop = Loop(model, [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Sequence) else optimizer)
    amount = Amount(steps, batch, sequence, rounds, tokens, plan, fleet, schedule, seed)
    layout = loop.layout
    group = workers or connect(on_lost=on_lost, start_timeout_s=start_timeout_s)
    try:
        found = _synced(method_of(method, options, amount, group.n, numel(layout)), sync)
        fragments(layout, found.cadence.fragments)  # refuses more of them than tensors
        _check_survival(found, survives, group)
        mark = hashlib.blake2b(f"{found!r} {layout_hash(layout)}".encode(), digest_size=8)
        seat = Seat(group.me, found, layout, int.from_bytes(mark.digest(), "little"))
        state = start(seat, master(loop.tree))
        group.all_equal(
            {"parameter layout": layout_hash(layout), "method, plan or length of the run": repr(found), "torch": torch.__version__}
        )
        outer = Outer(loop, seat, state, Place(group.me, group.n, mark.hexdigest()), group)
        if found.sync_from is not None:
            outer.sync()
    except BaseException as error:
        group.abort(error)
        loop.release()
        raise
    return outer


def _survives(on_lost: str) -> bool:
    if on_lost not in ("raise", "record"):
        raise BadInput(f'on_lost = {on_lost!r}: expected "raise" or "record"')
    return on_lost == "record"


def _check_survival(method: Method, survives: bool, group: Group) -> None:
    if survives and not method.outlives:
        raise BadInput(
            f'on_lost = "record": {method.name} needs every worker in each round, so none can go on without one: leave it at "raise", or '
            "use gossip (gasloc, noloco)"
        )
    if survives != group.board.survives:
        raise BadInput(f"gossamer.connect was called with another on_lost than gossamer.join ({survives=}): give both the same")


def _synced(method: Method, sync: str) -> Method:
    if sync == "check":
        return method
    kind, _, source = sync.partition(":")
    if kind != "from" or not source.isdecimal():
        raise BadInput(f'sync = {sync!r}: expected "check", or "from:0" to start all from the parameters of worker 0')
    return replace(method, sync_from=int(source))

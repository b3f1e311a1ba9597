"""Groups over gloo: who this process is, where the others are, and whom it tells that it only lost another one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from gossamer.core.errors import BadInput
from gossamer.net.gloo import GlooWire, c10d
from gossamer.net.site import site_of
from gossamer.real.group import Group
from gossamer.real.seats import Seats
from gossamer.real.wire import Store
from gossamer.worker.effects import Addr

STORE_ENV = "GOSSAMER_STORE"
"""Path of the file over which the processes of one `launch` find each other."""

_joined = 0  # groups made by this process: each has its own names in the store


def over_gloo(
    store: Store,
    me: Addr,
    n: int,
    *,
    local: bool = False,
    start_timeout_s: float = 600.0,
    survives: bool = False,
    seats: Seats | None = None,
    device: str = "cpu",
) -> Group:
    """Worker `me` of `n`, connected to all others by gloo.

    Args:
        store: a store of torch.distributed, by which the workers find each other.
        local: all workers are on this machine: keep to the loopback interface.
        start_timeout_s, survives, seats: as of Group.
        device: where the models are ("cpu" or "cuda"), for the process groups of workers of several ranks.

    Raises:
        RunFailed: some workers did not come; the message names them.
    """

    def connect(channel: Literal["data", "notes"]) -> GlooWire:
        return GlooWire(c10d.PrefixStore(channel, store), me, n, local=local)

    return Group(
        store,
        me,
        n,
        connect,
        start_timeout_s=start_timeout_s,
        survives=survives,
        blame=lambda lost: _mark(me, lost),
        remedy="start all of them, with one MASTER_ADDR and MASTER_PORT that each can reach",
        seats=seats,
        site=lambda: site_of(store, seats, me, device=device, local=local),
    )


def marker_of(store: str | Path, worker: Addr) -> Path:
    """Where a worker of `launch` that only lost another one writes which: it tells the cause of a failure from its consequences."""
    return Path(f"{store}.lost-{worker}")


def begun_of(store: str | Path, worker: Addr) -> Path:
    """Which a worker of `launch` makes when it is connected to all others. Before all are, nobody can go on without one that is gone."""
    return Path(f"{store}.begun-{worker}")


def _mark(me: Addr, lost: Addr) -> None:
    if STORE_ENV in os.environ:
        marker_of(os.environ[STORE_ENV], me).write_text(str(lost))


def common_store(n: int, start_timeout_s: float) -> Any:
    """What the n processes of one `launch`, or of torchrun, find each other by: a store of torch.distributed.

    Raises:
        BadInput: the environment is incomplete.
    """
    env = os.environ
    if STORE_ENV in env:
        return c10d.FileStore(env[STORE_ENV], n)
    missing = [k for k in ("MASTER_ADDR", "MASTER_PORT") if k not in env]
    if missing:
        raise BadInput(f"{' and '.join(missing)} must be set beside RANK: start with torchrun or --workers")
    return next(iter(c10d.rendezvous("env://", timeout=timedelta(seconds=start_timeout_s))))[0]


def all_here(n: int) -> bool:
    """Whether all n processes are on this machine, and may keep to the loopback interface."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(n) and "GLOO_SOCKET_IFNAME" not in os.environ


def world_of(size: int, site: str) -> tuple[int, bool]:
    """(rank, whether all are started) of this process, where torchrun or the first rank has started it; (0, False): neither.

    Raises:
        BadInput: as many processes were started as the worker has not.
    """
    env = os.environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return 0, False
    try:
        rank, n = int(env["RANK"]), int(env["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise BadInput(f"RANK and WORLD_SIZE must both be set, to numbers ({error}): start with torchrun, or set neither") from error
    if n != size:
        raise BadInput(
            f"{n} processes were started for site {site} (WORLD_SIZE), whose worker has {size} ranks in the fleet: start {size}, or one "
            "without RANK and WORLD_SIZE, which starts the others itself"
        )
    return rank, True


def init(*, start_timeout_s: float = 600.0, survives: bool = False, seats: Seats | None = None, device: str = "cpu") -> Group:
    """Connects this process to the others of its run: one worker per process, or (`seats`) one rank of a worker.

    Where they are: of `launch` (a file, no ports), else of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), else none: one worker.
    The connections are gloo groups of our own, beside torch's default group, which is neither needed nor touched: packets are CPU bytes.

    Raises:
        BadInput: the environment is incomplete.
        RunFailed: some workers did not come.
    """
    global _joined
    _joined += 1
    env = os.environ
    if STORE_ENV not in env and "RANK" not in env:
        return over_gloo(c10d.HashStore(), 0, 1, local=True)
    try:
        me, n = int(env["RANK"]), int(env["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise BadInput(f"RANK and WORLD_SIZE must both be set, to numbers ({error}): start with torchrun or --workers") from error
    store = common_store(n, start_timeout_s)
    name = f"gossamer/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joined}"
    if seats is not None and len(seats.workers) != n:
        raise BadInput(f"{n} processes were started for workers that have {len(seats.workers)} ranks together: start so many")
    store, local = c10d.PrefixStore(name, store), all_here(n)
    group = over_gloo(store, me, n, local=local, start_timeout_s=start_timeout_s, survives=survives, seats=seats, device=device)
    if STORE_ENV in env:
        begun_of(env[STORE_ENV], me).touch()
    return group

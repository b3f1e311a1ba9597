"""Small fleets for the tests of the real world: n workers in threads of one process, or in processes of `launch`.

Run as a script it is one worker: `python net_toys.py JOB FOLDER`, with JOB a function of this module that takes (group, folder); or,
with a number of workers after that, their launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gossamer.core.errors import BadInput, RunFailed
from gossamer.net import init, launch, over_gloo
from gossamer.real import Group, PeerLost, run
from gossamer.worker.effects import Addr, Boundary, Compute, Done, Expect, Gather, Go, Note, Program, Ready, Send, Span, Stop, Tag, Work
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, seal
from gossamer.worker.state import State

SAY = Tag.SAY


def in_threads(
    n: int,
    job: Callable[[Group], Any],
    *,
    close: bool = True,
    timeout_s: float = 60.0,
    survives: bool = False,
    group_of: Callable[[Addr], Group] | None = None,
) -> list[Any]:
    """What `job` returns for each worker. The first error that is not the loss of another worker is raised again, with
    the worker's number. Over gloo, or what `group_of` makes for each."""
    store = dist.HashStore()
    made = group_of or (lambda i: over_gloo(store, i, n, local=True, start_timeout_s=30, survives=survives))
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []

    def work(i: Addr) -> None:
        try:
            group = made(i)
            try:
                results[i] = job(group)
                if close:
                    group.close()
            except BaseException as error:
                group.abort(error)
                raise
        except BaseException as error:
            errors.append((i, error))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        errors.sort(key=lambda e: isinstance(e[1], PeerLost))
        errors[0][1].add_note(f"in worker {errors[0][0]}")
        raise errors[0][1]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def in_processes(n: int, job: str, folder: Path) -> tuple[int, str]:
    """The exit code of `launch`, and what it said."""
    root = Path(__file__).resolve().parent.parent
    said: list[str] = []
    env = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    argv = [sys.executable, "-m", "net_toys", job, str(folder)]
    code = launch(n, argv, folder, env=env, say=said.append, last_checkpoint=lambda: "round 3 in ckpt", modules=("net_toys",))
    return code, "\n".join(said)


class Body:
    """Sleeps so many seconds per step."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def compute(self, work: Work) -> Done:
        time.sleep(self.step_s * work.steps)
        return Done({}, work.steps, 0.0)

    def load(self, tree: Mapping[str, torch.Tensor], reset_inner: bool = False) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Hooks:
    """Remembers all it is told; `at_boundary` may add to it."""

    def __init__(self, at_boundary: Callable[[int], Any] = lambda round: None) -> None:
        self.spans: list[tuple[Addr, str, float, float, int]] = []
        self.notes: list[dict[str, Any]] = []
        self.rounds: list[int] = []
        self.at_boundary = at_boundary

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: object) -> Go | Stop:
        self.rounds.append(round)
        return Stop() if isinstance(self.at_boundary(round), Stop) else Go()

    def note(self, record: dict[str, Any]) -> None:
        self.notes.append(record)

    def span(self, worker: Addr, kind: str, start_s: float, end_s: float, round: int) -> None:
        self.spans.append((worker, kind, start_s, end_s, round))


def payload_of(sender: Addr, round: int, nbytes: int) -> torch.Tensor:
    """Bytes that anybody can compute."""
    return torch.from_numpy(np.resize(np.arange(sender * 7 + round * 3, 251, dtype=np.uint8), nbytes))


def packet_of(sender: Addr, round: int, nbytes: int) -> Packet:
    """A packet of `nbytes` payload bytes."""
    data = blank(nbytes)
    data[HEADER_BYTES:] = payload_of(sender, round, nbytes)
    return seal(data, Header(1, round, sender, SAY, 0, 1, 0, 0, 10))


def same(packet: Packet, sender: Addr, round: int, nbytes: int) -> bool:
    """Whether a packet is bit for bit what `packet_of` made."""
    return packet.data is not None and torch.equal(packet.data, packet_of(sender, round, nbytes).data)


def talk(me: Addr, peers: Callable[[int], Sequence[Addr]], rounds: int, nbytes: Callable[[Addr], int] = lambda j: 1000) -> Program:
    """Work, say to the peers of the round, hear from them, check every bit."""
    state = State(x={})
    while state.round < rounds:
        t, mine = state.round, peers(state.round)
        yield Expect(Tag.of(t, SAY), {j: HEADER_BYTES + nbytes(j) for j in mine})
        yield Compute(Work(1, 1, 0.0, 0.0))
        yield Ready(mine, t)
        packet = packet_of(me, t, nbytes(me))
        yield Span("encode", nbytes(me))
        yield Send(mine, Tag.of(t, SAY), packet)
        heard = yield Gather(Tag.of(t, SAY), mine, t)
        assert list(heard) == list(mine)
        for j, got in heard.items():
            assert same(got, j, t, nbytes(j)), f"other bytes from worker {j} in round {t}"
        yield Span("decode", nbytes(me))
        state.round += 1
        yield Note({"kind": "round", "round": state.round})
        if isinstance((yield Boundary(state.round, state)), Stop):
            break
    return state


def all_but(me: Addr, n: int) -> tuple[Addr, ...]:
    return tuple(j for j in range(n) if j != me)


# ---- jobs of worker processes


def exchange(group: Group, folder: Path) -> None:
    """Everybody with everybody, big and small; then bytes and a mean outside the program."""
    hooks = Hooks()
    me, n = group.me, group.n
    program = talk(me, lambda _: all_but(me, n), 4, lambda j: 5_000_000 if j == 0 else 64 + j)
    state, account = run(program, Body(0.01), hooks, group)
    got = group.gather_bytes(bytes([me]) * me)
    report = {"round": state.round, "sent": account.bytes_sent, "received": account.bytes_received, "bytes": [list(b) for b in got or []]}
    (folder / f"{me}.json").write_text(json.dumps(report))


def die(group: Group, folder: Path) -> None:
    """Worker 1 is killed in round 2."""

    def at_boundary(round: int) -> None:
        if group.me == 1 and round == 2:
            print("last words of worker 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    talk_on(group, folder, Hooks(at_boundary))


def raise_error(group: Group, folder: Path) -> None:
    """Worker 2 raises in round 2."""

    def at_boundary(round: int) -> None:
        if group.me == 2 and round == 2:
            raise ValueError("a bug of worker 2")

    talk_on(group, folder, Hooks(at_boundary))


def bad_input(group: Group, folder: Path) -> None:
    raise BadInput("no such thing")


def until_stopped(group: Group, folder: Path) -> None:
    """Runs until a signal; says that it runs, and where it stopped."""
    state = talk_on(group, folder, Hooks(lambda round: (folder / f"{group.me}.runs").touch() if round == 1 else None))
    (folder / f"{group.me}.stopped").write_text(str(state.round))


def talk_on(group: Group, folder: Path, hooks: Hooks) -> State:
    """All with all, for long. Who loses a peer writes which."""
    try:
        state, _ = run(talk(group.me, lambda _: all_but(group.me, group.n), 100_000), Body(0.005), hooks, group)
    except PeerLost as error:
        (folder / f"{group.me}.lost").write_text(str(error.worker))
        raise
    return state


def main() -> int:
    torch.set_num_threads(1)
    job, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    if len(sys.argv) > 3:
        code, said = in_processes(int(sys.argv[3]), sys.argv[1], folder)
        print(said)
        return code
    try:
        with init(start_timeout_s=60) as group:
            job(group, folder)
        return 128 + group.stopped_by if group.stopped_by else 0
    except (BadInput, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1


if __name__ == "__main__":
    sys.exit(main())

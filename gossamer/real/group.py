"""The workers of one run, connected.

    with Group(store, me, n, connect) as group:
        group.all_equal({"configuration": config_hash, "parameter layout": layout_hash})
        state, account = run(program, body, hooks, group)
        mean = group.mean_trees(state.x)

Start-up, comparisons before anything is sent, messages outside the programs, and the farewell.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gossamer.core.combine import normalised
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree
from gossamer.real.board import Board, PeerLost
from gossamer.real.notes import Notes
from gossamer.real.seats import Seats
from gossamer.real.site import Alone, Site
from gossamer.real.transport import Receipt, Transport
from gossamer.real.wire import Connect, Store
from gossamer.worker.effects import Addr, Tag

_SIZE_TAG, _BYTES_TAG, _SPREAD_TAG = Tag.of(0, 7), Tag.of(1, 7), Tag.of(6, 7)  # kind 7 is no program's; gossamer.net.probe has others
_POLL_S = 0.01
_FAULT_S = 1.0
"""Who waits for a worker that has failed in a comparison gives itself so long to find the same fault, and to say that."""


class NotMet(RunFailed):
    """Some workers did not come, or went before the run had begun."""


class Group:
    """Worker `me` of `n`, connected to all other members.

    Args:
        store: what the workers find each other by, and post short texts on.
        connect: makes the two wires, once all workers have come.
        start_timeout_s: how long to wait for the others at the start, and in `all_equal`.
        survives: go on when another worker is gone (gossip), once all have started.
        blame: told of the worker that this one has lost, when that is why it fails.
        remedy: what to do where some workers do not come.
        seats: which processes are ranks of one worker, where some have several; `me`, `n` and all addresses are seats then.
        site: connects this process to the other ranks of its worker, once all workers have come.
        members: who takes part, `me` among them, in rising order; None: all n. The others have no connections, and are absent throughout.
        waiting: called again and again while the others are waited for, at the start and in `all_equal`; what it raises ends that.

    Raises:
        NotMet: some workers did not come; the message names them.
    """

    def __init__(
        self,
        store: Store,
        me: Addr,
        n: int,
        connect: Connect,
        *,
        start_timeout_s: float = 600.0,
        survives: bool = False,
        blame: Callable[[Addr], None] = lambda lost: None,
        remedy: str = "start all of them",
        seats: Seats | None = None,
        site: Callable[[], Site] = Alone,
        members: Sequence[Addr] | None = None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.me, self.n = me, n
        self.members = tuple(range(n) if members is None else members)
        """Who takes part."""
        self.board = Board(survives, seats, me)
        self.apart_sent_bytes = 0
        """Bytes of `gather_bytes`, `mean_trees` and `spread` sent by this worker, counted apart from the exchange of the method."""
        self.apart_received_bytes = 0
        self._store = store
        self._timeout_s, self._remedy, self._blame, self._waiting = start_timeout_s, remedy, blame, waiting
        self._compared = 0
        self._closed = False
        self._everybody("here", f"{socket.gethostname()}, process {os.getpid()}")
        self.transport = Transport(connect("data"), self.board, self.members)
        self.notes = Notes(connect("notes"), self.board, self.members)
        self.site = site()
        """The ranks of this worker."""

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error)

    @property
    def stopped_by(self) -> int | None:
        """The signal (to any worker) for which this one stopped early: exit code 128 + it; 0: the hooks asked; None: it ran to its end."""
        return self.notes.signal if self.notes.stopped else None

    @property
    def last_round(self) -> int | None:
        """The boundary at which all workers will stop, once that is agreed. Known before the hooks hear of that boundary."""
        return self.notes.last_round

    @property
    def living(self) -> tuple[Addr, ...]:
        """The workers that are there, this one included, in id order. All but those whose death this one has learned of."""
        return tuple(sorted((self.me, *self.notes.living)))

    def ask_stop(self, signal: int = 0) -> None:
        """Asks all workers to stop at one boundary, for a signal or (0) for another reason. Safe in a signal handler."""
        self.notes.ask_stop(signal)

    def all_equal(self, values: Mapping[str, str | int]) -> None:
        """Compares named values (hashes of configuration and layout, run id) across the workers, before anything is posted: no wire
        takes a message longer than the receive posted for it, and gloo aborts the process.

        Raises:
            RunFailed: naming the worker that differs, and in what.
        """
        self._compared += 1
        for what, value in values.items():
            found = self._everybody(f"equal/{self._compared}/{what}", str(value))
            (common, count), *rest = Counter(found.values()).most_common()
            if not rest:
                continue
            if count == rest[0][1]:
                common = found[self.members[0]]
            odd = [j for j in sorted(found) if found[j] != common]
            workers = f"worker {odd[0]} has" if len(odd) == 1 else f"workers {', '.join(map(str, odd))} have"
            raise RunFailed(
                f"{workers} another {what} than the others ({found[odd[0]]}, expected {common}): "
                "all workers must run one configuration and one release"
            )

    def post(self, key: str, value: str) -> None:
        """Puts a short text where all workers can see it. Nobody waits."""
        self._store.set(f"posted/{key}", value)

    def posted(self, keys: Sequence[str], *, wait: bool = False) -> list[str] | None:
        """The texts posted under `keys`; None while one is missing, unless `wait`.

        Raises:
            RunFailed: while waiting, a worker is gone.
        """
        names = [f"posted/{key}" for key in keys]
        while not self._store.check(names):
            if not wait:
                return None
            self.board.check()
            time.sleep(_POLL_S)
        return [self._store.get(name).decode() for name in names]

    def posted_by(self, keys: Mapping[Addr, str], *, wait: bool = False) -> dict[Addr, str] | None:
        """The texts that workers posted, each under its key; None while one of the living lacks, unless `wait`. The dead may have posted
        theirs or not.

        Raises:
            RunFailed: while waiting, a worker is gone.
        """
        while self.posted([key for j, key in keys.items() if j not in self.board.dead]) is None:
            if not wait:
                return None
            self.board.check()
            time.sleep(_POLL_S)
        return {j: found[0] for j, key in keys.items() if (found := self.posted([key]))}

    def gather_bytes(self, data: bytes, to: Addr = 0) -> list[bytes] | None:
        """Everybody's bytes at worker `to`, in id order; None elsewhere, at once. All workers call it, in the same order of calls.

        Raises:
            RunFailed: a worker is gone.
        """
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if self.me != to:
            self._hand_over(mine, to)
            return None
        return [bytes(t.numpy()) for _, t in self._collect(mine)]

    def mean_trees(self, tree: Tree, to: Addr = 0) -> Tree | None:
        """The fleet's mean at worker `to`, None elsewhere: sum of float32(1/n) * tree_i in id order, multiply, then add, the same bits as
        `gossamer.core.combine.mean`; of those that are left, where some have died. It holds three trees beside its own, whatever n. Bytes:
        one tree from each other worker.

        Raises:
            RunFailed: a worker is gone, or has a tree of another size.
        """
        trees = self.gather_trees(tree, to)
        if trees is None:
            return None
        count, came = len(self.living), 0
        weight = normalised(dict.fromkeys(range(count), 1.0))[0]
        acc: Tree = {}
        for _, one in trees:
            came += 1
            if not acc:
                acc = {k: v * weight for k, v in one.items()}
                continue
            for k, a in acc.items():
                a.add_(one[k] * weight)
        if came != count:  # somebody has died meanwhile
            for a in acc.values():
                a.mul_(count / came)
        return acc

    def spread(self, data: Tensor | None, nbytes: int, frm: Addr) -> Tensor:
        """The `nbytes` > 0 bytes of worker `frm` at each of the living; the others give None. All call it, in the same order of calls.

        Raises:
            RunFailed: a worker is gone.
        """
        if data is not None:
            for j in self.living:
                if j != self.me:
                    self.transport.send(j, _SPREAD_TAG, data)
                    self.apart_sent_bytes += nbytes
            return data
        found: Tensor | None = self._await(self.transport.receive(frm, _SPREAD_TAG, nbytes, lambda t: t))
        if found is None:
            raise RunFailed(f"{self.board.name(frm)} is gone, and what it was to tell all others with it")
        self.apart_received_bytes += nbytes
        return found

    def gather_trees(
        self, tree: Tree, to: Addr = 0, shapes: Callable[[Addr], Mapping[str, torch.Size]] | None = None
    ) -> Iterator[tuple[Addr, Tree]] | None:
        """Everybody's tree as float32 at worker `to`, one after the other in id order (take them all), without those of the dead; None
        elsewhere, at once.

        Args:
            shapes: of the tensors of each, in the order of the tree; None: as here.

        Raises:
            RunFailed: a worker is gone, or has a tree of another size.
        """
        full = {k: v.detach().to("cpu", torch.float32).contiguous() for k, v in tree.items()}
        flat = torch.cat([v.view(-1) for v in full.values()]).view(torch.uint8) if full else torch.empty(0, dtype=torch.uint8)
        if self.me != to:
            self._hand_over(flat, to)
            return None
        mine = {k: v.shape for k, v in full.items()}
        return self._as_trees(flat, shapes or (lambda _: mine))

    def _as_trees(self, flat: Tensor, shapes: Callable[[Addr], Mapping[str, torch.Size]]) -> Iterator[tuple[Addr, Tree]]:
        for j, data in self._collect(flat):
            like = shapes(j)
            sizes = [shape.numel() for shape in like.values()]
            if data.numel() != 4 * sum(sizes):
                raise RunFailed(f"{self.board.name(j)} has {data.numel() // 4} parameters, expected {sum(sizes)}")
            pieces = torch.split(data.view(torch.float32), sizes)
            yield j, {k: piece.view(shape) for (k, shape), piece in zip(like.items(), pieces, strict=True)}

    def _hand_over(self, data: Tensor, to: Addr) -> None:
        size = torch.frombuffer(bytearray(data.numel().to_bytes(8, "little")), dtype=torch.uint8)
        self.transport.send(to, _SIZE_TAG, size)
        if data.numel():
            self.transport.send(to, _BYTES_TAG, data)
        self.apart_sent_bytes += size.numel() + data.numel()

    def _collect(self, mine: Tensor) -> Iterator[tuple[Addr, Tensor]]:
        """Own and others' bytes in id order, one at a time. Of the dead there are none."""
        sizes = {j: self.transport.receive(j, _SIZE_TAG, 8, _as_size) for j in self.transport.others}
        for j in self.members:
            if j == self.me:
                yield j, mine
                continue
            size: int | None = self._await(sizes[j])
            if size is None:
                continue
            self.apart_received_bytes += 8 + size
            data = self._await(self.transport.receive(j, _BYTES_TAG, size, lambda t: t)) if size else torch.empty(0, dtype=torch.uint8)
            if data is not None:
                yield j, data

    def _await(self, receipt: Receipt) -> Any:
        """What came; None where the sender has died first."""
        self.board.wait(lambda: receipt.done or (receipt.lost and receipt.src in self.board.dead))
        return receipt.value

    def close(self) -> None:
        """The farewell: waits until everything sent has been received, here and everywhere, then closes the connections.

        Whoever ends first waits for the others; without that, messages are lost and the store, which lives in the first worker under
        torchrun, goes before its time.

        Raises:
            RunFailed: a worker is gone, or two programs disagree on how many messages passed between them.
        """
        if self._closed:
            return
        board, transport, notes = self.board, self.transport, self.notes
        try:
            notes.end(transport.sent, transport.posted)
            board.wait(lambda: all(j in notes.ended for j in notes.living))
            for j, (theirs, awaited) in sorted((j, notes.ended[j]) for j in notes.living):
                for src, dst, sent, posted in ((self.me, j, transport.sent[j], awaited), (j, self.me, theirs, transport.posted[j])):
                    if sent > posted:
                        raise RunFailed(f"worker {src} has sent {sent} messages to worker {dst}, which awaited {posted}")
            board.wait(lambda: all(not transport.sending[j] and transport.received[j] >= notes.ended[j][0] for j in notes.living))
            notes.leave()
        except BaseException as error:
            self.abort(error)
            raise
        self._closed = True
        self.site.close()
        self._hang_up()

    def abort(self, error: BaseException) -> None:
        """Ends at once after a failure: tells the others who is to blame, then closes the connections."""
        if self._closed:
            return
        self._closed = self.board.over = True
        to_blame = error.worker if isinstance(error, PeerLost) else self.me
        if to_blame != self.me:
            self._blame(to_blame)
        self.notes.lost(to_blame, self.board.round, timeout_s=0.5)
        self._hang_up()

    def _hang_up(self) -> None:
        self.board.over = True
        self.transport.hang_up()
        self.notes.hang_up()

    def _everybody(self, key: str, value: str) -> dict[Addr, str]:
        """Everybody's value of `key`, over the store."""
        self._store.set(f"{key}/{self.me}", value)
        missing, found = list(self.members), {}
        deadline_s = time.monotonic() + self._timeout_s
        while missing:
            for j in [j for j in missing if self._store.check([f"{key}/{j}"])]:
                found[j] = self._store.get(f"{key}/{j}").decode()
                missing.remove(j)
            if gone := [j for j in missing if j in self.board.dead]:
                raise NotMet(f"worker {gone[0]} is gone before the run has begun ({self.board.dead[gone[0]]})")
            if missing and time.monotonic() > deadline_s - self._timeout_s + _FAULT_S:
                self.board.check()
            if missing and time.monotonic() > deadline_s:
                raise NotMet(
                    f"worker {self.me} has waited {self._timeout_s:.0f} s at the start for worker(s) {', '.join(map(str, missing))}: "
                    f"{self._remedy}"
                )
            if missing:
                self._waiting()
                time.sleep(_POLL_S)
        return found


def _as_size(data: Tensor) -> int:
    return int.from_bytes(data.numpy().tobytes(), "little")

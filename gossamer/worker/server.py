"""Asynchronous tiers (HALoS): a worker that asks its region's server, the local servers, and the global one.

    worker          pulls x, takes H_i steps, pushes D = x - y, waits for its server's answer and goes on from there
    local server    each push:  a delayed Nesterov step on D, then the answer, its x
                    K accepted pushes after the last merge:  u = M - x goes to the global server
                    its answer, x_g:  x <- (1 - a) x + a x_g;  M <- x
    global server   each report: a delayed Nesterov step on u, then the answer, its x

Everything sent to a server has the tag `TO_SERVER`; what it is follows from who sends it. A client says in a last packet that it is done.

A report travels while the local server goes on serving. What it accepts between a report and the answer is in its x, and so in
(1 - a) x of the merge, but M <- x leaves it out of every u: the global server never hears of it. That is the published system. At the
end, when its workers are done, a local server reports what it has, K or not, and does not wait for an answer. Where they stop before the
end it does not: a run that goes on later goes on with what is not reported. What a server has taken in it takes in once, whoever says it
again (a client that begins anew from an earlier boundary): it answers, and that is all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from gossamer.core.errors import RunFailed
from gossamer.core.outer import drift
from gossamer.core.tiers import Tiers
from gossamer.core.tree import Tree, digest, map_tree, master, squares
from gossamer.worker.effects import (
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Load,
    Note,
    Program,
    Ready,
    RecvAny,
    Send,
    SiteSum,
    Span,
    Stop,
    Tag,
    Work,
)
from gossamer.worker.pace import program
from gossamer.worker.packet import DONE, HEADER_BYTES, REFUSED, Packet
from gossamer.worker.seat import Said, Seat
from gossamer.worker.server_state import ServerState
from gossamer.worker.state import State

TO_SERVER = Tag.of(0, Tag.TIER)
"""The tag of all that servers take in."""


class ServerGone(RunFailed):
    """A server without which a program cannot go on is dead."""


def programs(seats: Sequence[Seat], states: Sequence[State]) -> list[Program]:
    """The programs of a run: one a worker, then one a server, where the method has servers. Seats and states are the workers' own."""
    tiers = seats[0].method.tiers
    if tiers is None:
        return [program(seat, state) for seat, state in zip(seats, states, strict=True)]
    clients = [client(seat, state) for seat, state in zip(seats, states, strict=True)]
    x = states[0].x
    servers = [Seat(addr, seats[0].method, seats[0].layout, seats[0].run_id) for addr in range(tiers.n, tiers.top + 1)]
    return clients + [server(seat, first_of(seat, master(x))) for seat in servers]


def first_of(seat: Seat, x: Tree, *, fresh: bool = True) -> ServerState:
    """What the server of this seat begins with. `x` becomes its own. `fresh`: the run begins, so that all begin with this x."""
    tiers, top = _tiers(seat), seat.me == _tiers(seat).top
    return ServerState.begin(tiers.top_rule if top else tiers.local_rule, x, local=not top, fresh=fresh)


def server(seat: Seat, held: ServerState, *, since: int = 0, there: Collection[int] | None = None) -> Program:
    """The program of the server of this seat.

    Args:
        since: blocks that every worker has completed when it begins.
        there: seats that take part; None: all.
    """
    clients = [j for j in _tiers(seat).clients(seat.me) if there is None or j in there]
    return global_server(seat, held, clients) if seat.me == _tiers(seat).top else local_server(seat, held, dict.fromkeys(clients, since))


def _tiers(seat: Seat) -> Tiers:
    assert seat.method.tiers is not None
    return seat.method.tiers


def client(seat: Seat, state: State) -> Program:
    """The program of one worker of a method with servers. A round is one block: pull, H_i steps, push."""
    method, plan, home = seat.method, seat.method.plan, _tiers(seat).home(seat.me)
    steps, batch, stream = plan.steps[seat.me], plan.batch[seat.me], state.streams[0]
    if state.x:
        yield Load(state.x)
    while state.round < method.rounds:
        t = state.round
        answer = Tag.of(t, Tag.TIER)
        yield Expect(answer, {home: seat.whole_bytes})
        done: Done = yield Compute(Work(steps, batch, float(state.tokens), plan.tokens_per_round / steps))
        yield Ready((home,), t)
        D, norm, refused = {}, 0.0, False
        if done.tree:
            D = drift(state.x, done.tree)
            norm = float((yield SiteSum(squares(list(D.values())))).sqrt())
            refused = method.guard.refuses(norm, stream.norms)
            if refused:
                D = map_tree(torch.zeros_like, D)
            else:
                stream.norms = method.guard.remember(norm, stream.norms)
        said = Said(t, 0 if refused else done.tokens, digest(state.x) if state.x and not t else 0, REFUSED if refused else 0)
        packet = seat.pack(D or None, seat.layout, Tag.TIER, said)
        yield Span("encode", 4 * seat.elements)
        yield Send((home,), TO_SERVER, packet)
        # What it waits for carries its own compute alone: the network's and the server's time, and nobody's straggling.
        answers: dict[int, Packet] = yield Gather(answer, (home,), t, {home: (seat.me,)})
        if home not in answers:
            raise ServerGone(f"the server of worker {seat.me}'s region is gone, and with it what its workers learn from each other")
        heard = answers[home]
        seat.check(heard, t, home)
        yield Span("decode", 4 * seat.elements)
        if state.x:
            state.x = _tree(seat, heard, state.x)
            yield Load(state.x, reset_inner=refused or method.reset_inner)
        state.round += 1
        state.tokens += plan.tokens_per_round
        yield Note(
            {
                "kind": "round",
                "round": state.round,
                "worker": seat.me,
                "tokens": done.tokens,
                "tokens_total": state.tokens,
                "steps": steps,
                "loss": done.loss_sum / done.tokens if done.tokens else None,
                "drift_norm": norm,
                "refused": [seat.me] if refused else [],
            }
        )
        if isinstance((yield Boundary(state.round, state)), Stop):
            break
    yield from _farewell(seat, state)
    yield Note({"kind": "close", "round": state.round, "worker": seat.me})
    return state


def local_server(seat: Seat, held: ServerState, blocks: dict[int, int]) -> Program:
    """The program of a region's server, until all its workers are done. The state that it ends with counts its reports.

    Args:
        blocks: worker -> blocks that it has completed.
    """
    tiers, rounds = _tiers(seat), seat.method.rounds
    rule, top, x, merged = tiers.local_rule, tiers.top, held.x, held.merged
    start = digest(x) if held.fresh else 0
    waiting = stopped = False
    while blocks or waiting:
        frm, packet = yield RecvAny(TO_SERVER, (*blocks, top), seat.whole_bytes)
        if packet is None:
            if frm == top:
                raise ServerGone("the global server is gone, and with it the model of the run")
            del blocks[frm]
            continue
        if frm == top:
            seat.check(packet, held.reports, top)
            yield Span("decode", 4 * seat.elements)
            if x:
                for k, v in _tree(seat, packet, x).items():
                    x[k].mul_(1.0 - tiers.merge).add_(v, alpha=tiers.merge)
                    merged[k].copy_(x[k])
            held.unmerged, held.reports, waiting = 0, held.reports + 1, False
            yield Span("outer", 12 * seat.elements)
            continue
        t = blocks[frm]
        seat.check(packet, t, frm)
        if packet.header.flags & DONE:
            stopped |= t < rounds
            del blocks[frm]
            continue
        blocks[frm] += 1
        if held.fresh:
            _same_start(packet, start)
        yield Span("decode", 4 * seat.elements)
        if t >= held.taken.get(frm, 0):
            held.taken[frm] = t + 1
            if not packet.header.flags & REFUSED:
                if x:
                    rule.step(x, _tree(seat, packet, x), held.memory)
                held.unmerged += 1
                yield Span("outer", 12 * seat.elements)
        if held.unmerged >= tiers.report_every and not waiting:  # the answer to a report sets the count to 0
            yield from _report(seat, held)
            waiting = True
        answer = seat.pack(x or None, seat.layout, Tag.TIER, Said(t, 0))
        yield Span("encode", 4 * seat.elements)
        yield Send((frm,), Tag.of(t, Tag.TIER), answer)
    if held.unmerged and not stopped:
        yield from _report(seat, held, DONE)
        held.reports += 1
        held.forget()
    else:
        yield from _farewell(seat, State(x=x, round=held.reports))
    return State(x=x, round=held.reports)


def global_server(seat: Seat, held: ServerState, clients: Sequence[int]) -> Program:
    """The program of the server of the local servers, until all of them are done. Its x is the model of the run; it crosses a boundary
    after each update of it, and before the first. The state that it ends with counts the updates."""
    tiers = _tiers(seat)
    rule, x = tiers.top_rule, held.x
    rounds: dict[int, int | None] = dict.fromkeys(clients)
    start = digest(x) if held.fresh else 0
    yield Boundary(held.reports, State(x=x, round=held.reports))
    while rounds:
        frm, packet = yield RecvAny(TO_SERVER, tuple(rounds), seat.whole_bytes)
        if packet is None:
            del rounds[frm]
            continue
        due = rounds[frm]
        t = packet.header.round if due is None else due  # the first says where its sender is
        seat.check(packet, t, frm)
        rounds[frm] = t + 1
        if packet.nbytes > HEADER_BYTES and t >= held.taken.get(frm, 0):
            if held.fresh:
                _same_start(packet, start)
            yield Span("decode", 4 * seat.elements)
            if x:
                rule.step(x, _tree(seat, packet, x), held.memory)
            held.taken[frm] = t + 1
            held.reports += 1
            yield Span("outer", 12 * seat.elements)
            yield Boundary(held.reports, State(x=x, round=held.reports))
        if packet.header.flags & DONE:
            del rounds[frm]
            continue
        answer = seat.pack(x or None, seat.layout, Tag.TIER, Said(t, 0))
        yield Span("encode", 4 * seat.elements)
        yield Send((frm,), TO_SERVER, answer)
    return State(x=x, round=held.reports)


def _report(seat: Seat, held: ServerState, flags: int = 0) -> Iterator[Effect]:
    """Sends u = M - x to the global server."""
    u = map_tree(torch.sub, held.merged, held.x)
    mark = digest(held.merged) if u and not held.reports and held.fresh else 0
    packet = seat.pack(u or None, seat.layout, Tag.TIER, Said(held.reports, 0, mark, flags))
    yield Span("encode", 4 * seat.elements)
    yield Send((_tiers(seat).top,), TO_SERVER, packet)


def _farewell(seat: Seat, state: State) -> Iterator[Effect]:
    """Tells a client's server that nothing more will come."""
    tiers = _tiers(seat)
    server = tiers.home(seat.me) if seat.me < tiers.n else tiers.top
    yield Send((server,), TO_SERVER, seat.pack({} if state.x else None, (), Tag.TIER, Said(state.round, 0, flags=DONE)))


def _tree(seat: Seat, packet: Packet, like: Tree) -> Tree:
    """What a packet carries, bit for bit."""
    # Adding to -0.0 changes nothing, the sign of a zero included.
    tree = map_tree(lambda t: torch.full_like(t, -0.0), like)
    seat.method.codec.accumulate(packet.payload, seat.layout, tree, 1.0)
    return tree


def _same_start(packet: Packet, start: int) -> None:
    """Refuses a first packet whose sender began elsewhere."""
    header = packet.header
    if header.round == 0 and packet.data is not None and header.digest not in (0, start):
        raise RunFailed(f"{header.sender} starts from other parameters than its server: use the same seed for all")

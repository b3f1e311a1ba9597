"""Asynchronous tiers (HALoS): a worker that asks its region's server, the local servers, and the global one.

    worker          pulls x, takes H_i steps, pushes D = x - y, waits for its server's answer and goes on from there
    local server    each push:  a delayed Nesterov step on D, then the answer, its x
                    K accepted pushes after the last merge:  u = M - x goes to the global server
                    its answer, x_g:  x <- (1 - a) x + a x_g;  M <- x
    global server   each report: a delayed Nesterov step on u, then the answer, its x

Everything sent to a server has the tag `TO_SERVER`; what it is follows from who sends it. A client says in a last packet that it is done.

A report travels while the local server goes on serving. What it accepts between a report and the answer is in its x, and so in
(1 - a) x of the merge, but M <- x leaves it out of every u: the global server never hears of it. That is the published system. At the
end, when its workers are done, a local server reports what it has, K or not, and does not wait for an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from gossamer.worker.state import State

TO_SERVER = Tag.of(0, Tag.TIER)
"""The tag of all that servers take in."""


def programs(seats: Sequence[Seat], states: Sequence[State]) -> list[Program]:
    """The programs of a run: one a worker, then one a server, where the method has servers. Seats and states are the workers' own."""
    tiers = seats[0].method.tiers
    if tiers is None:
        return [program(seat, state) for seat, state in zip(seats, states, strict=True)]
    clients = [client(seat, state) for seat, state in zip(seats, states, strict=True)]
    x = states[0].x
    servers = [Seat(addr, seats[0].method, seats[0].layout, seats[0].run_id) for addr in range(tiers.n, tiers.top + 1)]
    return clients + [local_server(seat, master(x)) for seat in servers[:-1]] + [global_server(servers[-1], master(x))]


def program_of(seat: Seat, state: State) -> Program:
    """The program of one seat of a method with servers. `state`: before the first round; of a server only x counts."""
    if seat.me < seat.method.n:
        return client(seat, state)
    return (global_server if seat.me == _tiers(seat).top else local_server)(seat, state.x)


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
            raise RunFailed(f"the server of worker {seat.me}'s region is gone, and with it what its workers learn from each other")
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


def local_server(seat: Seat, x: Tree) -> Program:
    """The program of a region's server, from x until all its workers are done. The state that it ends with counts its reports."""
    tiers = _tiers(seat)
    rule, blocks, top = tiers.local_rule, dict.fromkeys(tiers.clients(seat.me), 0), tiers.top
    state, memory, merged = State(x=x), rule.init(x), master(x)
    start = digest(x)
    unmerged = 0
    """Updates accepted since the last merge."""
    waiting = False
    while blocks or waiting:
        frm, packet = yield RecvAny(TO_SERVER, (*blocks, top), seat.whole_bytes)
        if packet is None:
            if frm == top:
                raise RunFailed("the global server is gone, and with it the model of the run")
            del blocks[frm]
            continue
        if frm == top:
            seat.check(packet, state.round - 1, top)
            yield Span("decode", 4 * seat.elements)
            if x:
                for k, v in _tree(seat, packet, x).items():
                    x[k].mul_(1.0 - tiers.merge).add_(v, alpha=tiers.merge)
                    merged[k].copy_(x[k])
            yield Span("outer", 12 * seat.elements)
            unmerged, waiting = 0, False
            continue
        t = blocks[frm]
        seat.check(packet, t, frm)
        if packet.header.flags & DONE:
            del blocks[frm]
            continue
        blocks[frm] += 1
        _same_start(packet, start)
        yield Span("decode", 4 * seat.elements)
        accepted = not packet.header.flags & REFUSED
        if accepted:
            if x:
                rule.step(x, _tree(seat, packet, x), memory)
            yield Span("outer", 12 * seat.elements)
            unmerged += 1
        if accepted and unmerged == tiers.report_every:  # so no report is under way: the answer to one sets the count to 0
            yield from _report(seat, state, merged)
            waiting = True
        answer = seat.pack(x or None, seat.layout, Tag.TIER, Said(t, 0))
        yield Span("encode", 4 * seat.elements)
        yield Send((frm,), Tag.of(t, Tag.TIER), answer)
    yield from _report(seat, state, merged, DONE) if unmerged else _farewell(seat, state)
    return state


def global_server(seat: Seat, x: Tree) -> Program:
    """The program of the server of the local servers, from x until all of them are done. Its x is the model of the run; it crosses a
    boundary after each update of it, and before the first. The state that it ends with counts the updates."""
    tiers = _tiers(seat)
    rule, rounds = tiers.top_rule, dict.fromkeys(tiers.clients(seat.me), 0)
    state, memory = State(x=x), rule.init(x)
    start = digest(x)
    yield Boundary(0, state)
    while rounds:
        frm, packet = yield RecvAny(TO_SERVER, tuple(rounds), seat.whole_bytes)
        if packet is None:
            del rounds[frm]
            continue
        t = rounds[frm]
        seat.check(packet, t, frm)
        rounds[frm] += 1
        if packet.nbytes > HEADER_BYTES:
            _same_start(packet, start)
            yield Span("decode", 4 * seat.elements)
            if x:
                rule.step(x, _tree(seat, packet, x), memory)
            yield Span("outer", 12 * seat.elements)
            state.round += 1
            yield Boundary(state.round, state)
        if packet.header.flags & DONE:
            del rounds[frm]
            continue
        answer = seat.pack(x or None, seat.layout, Tag.TIER, Said(t, 0))
        yield Span("encode", 4 * seat.elements)
        yield Send((frm,), TO_SERVER, answer)
    return state


def _report(seat: Seat, state: State, merged: Tree, flags: int = 0) -> Iterator[Effect]:
    """Sends u = M - x to the global server."""
    u = map_tree(torch.sub, merged, state.x)
    mark = digest(merged) if u and not state.round else 0
    packet = seat.pack(u or None, seat.layout, Tag.TIER, Said(state.round, 0, mark, flags))
    yield Span("encode", 4 * seat.elements)
    yield Send((_tiers(seat).top,), TO_SERVER, packet)
    state.round += 1


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
    if header.round == 0 and packet.data is not None and header.digest != start:
        raise RunFailed(f"{header.sender} starts from other parameters than its server: use the same seed for all")

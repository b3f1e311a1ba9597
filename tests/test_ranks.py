"""Workers of 1, 2 and 3 ranks in one run, on the toy model: bit for bit the run of workers of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Lockstep
from ranked import Ranked, seat_of, shard
from toy import ToyBody, toy_layout, toy_start

from gossamer.core import ranges as core_ranges
from gossamer.core.cadence import Cadence
from gossamer.core.codec import Fp16, Int8, Sign, TopK
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.exchange import Gather, Ring, Shard
from gossamer.core.feedback import Feedback
from gossamer.core.outer_torch import OuterTorch
from gossamer.core.plan import Plan, uniform
from gossamer.core.ranges import Ranges, rows_of
from gossamer.core.sketch import sketch, sketch_of_ranges
from gossamer.core.tree import layout_of, numel
from gossamer.recipes import Setting
from gossamer.recipes.gossip import dadam, gasloc
from gossamer.recipes.sync import ddp, diloco, geomesh
from gossamer.worker.effects import SiteSum
from gossamer.worker.packet import HEADER_BYTES

RANKS = (1, 2, 3)


def setting(n: int = 3, rounds: int = 4) -> Setting:
    return Setting(uniform(n, steps=2, batch=4, sequence=4), rounds)


def equal(a, b) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a)


def assert_as_single(method, ranks=RANKS, exact: bool = True) -> Ranked:
    """The workers end with the parameters of workers of one rank."""
    bodies = [[ToyBody(i, method.inner) for i in range(method.n)] for _ in range(2)]
    ranked, single = Ranked(method, ranks, bodies[0]), Lockstep(method, bodies[1])
    got, want = ranked.run(), single.run()
    for i in range(method.n):
        x = ranked.whole(got, i)
        if exact:
            assert equal(x, want[i].x), i
        else:
            assert all(torch.allclose(x[k], want[i].x[k], rtol=1e-6, atol=1e-7) for k in x), i
    return ranked


@pytest.mark.parametrize(
    "method",
    [
        diloco(setting()),
        replace(diloco(setting()), exchange=Gather()),
        replace(diloco(setting()), codec=Fp16(), exchange=Gather()),
        replace(diloco(setting()), cadence=Cadence(overlap=1)),
        replace(diloco(setting()), cadence=Cadence(fragments=3), exchange=Gather()),
        replace(diloco(setting()), outer=OuterTorch("adam", lr=0.01), exchange=Gather()),
        replace(diloco(setting()), sync_from=2),
        ddp(setting()),
        gasloc(setting(), topology="two_peer"),
        gasloc(setting(), topology="one_peer", momentum="local"),
        dadam(setting()),
    ],
    ids=lambda m: f"{m.name}-{type(m.exchange).__name__}-{type(m.codec).__name__}-{m.cadence.fragments}",
)
def test_any_number_of_ranks_ends_with_the_bits_of_one(method):
    assert_as_single(method)


@pytest.mark.parametrize("feedback", [None, Feedback()], ids=["plain", "feedback"])
@pytest.mark.parametrize("exchange", [Gather(), Shard()], ids=["gather", "shard"])
def test_geomesh_takes_its_magnitudes_from_all_ranks(feedback, exchange):
    method = replace(geomesh(setting()), feedback=feedback, exchange=exchange, codec=Sign())
    if exchange.meets and feedback:
        method = replace(method, feedback=Feedback(ends="worker"))
    assert_as_single(method, exact=False)  # float64 sums in another order, rounded to float32


def test_a_magnitude_of_one_rank_alone_would_be_noticed(monkeypatch):
    method = geomesh(setting())
    together = Ranked._together

    def alone(self, worker, effects):
        magnitudes = isinstance(effects[0], SiteSum) and effects[0].value.ndim == 2
        return [e.value for e in effects] if magnitudes else together(self, worker, effects)

    monkeypatch.setattr(Ranked, "_together", alone)
    with pytest.raises((AssertionError, RunFailed)):
        assert_as_single(method, exact=False)


@pytest.mark.parametrize("codec", [Int8(block=4), TopK(share=0.25, chunk=16)], ids=["int8", "topk"])
def test_replicas_of_unlike_rank_counts_decode_the_same_numbers(codec):
    method = replace(diloco(setting()), codec=codec, exchange=Gather())
    ranked = Ranked(method, RANKS)
    states = ranked.run()  # each round compares the marks of all anchors and momenta
    wholes = [ranked.whole(states, i) for i in range(3)]
    assert equal(wholes[0], wholes[1]) and equal(wholes[0], wholes[2])


def test_unequal_work_and_more_ranks_than_rows():
    plan = Plan((1, 2, 3), (2, 4, 4), 4)
    assert_as_single(replace(diloco(setting()), plan=plan, weights="tokens"), ranks=(9, 1, 4))


def test_a_worker_that_refuses_refuses_with_all_ranks():
    method = diloco(setting())
    bodies = [[ToyBody(i, method.inner, poison_at=3 if i == 2 else None) for i in range(3)] for _ in range(2)]
    ranked, single = Ranked(method, RANKS, bodies[0]), Lockstep(method, bodies[1])
    got, want = ranked.run(), single.run()
    assert equal(ranked.whole(got, 0), want[0].x)
    assert {s for s, r in ranked.notes if r.get("refused") == [2]} == set(range(6))


def test_bytes_go_once_to_each_worker():
    method = replace(diloco(setting(rounds=1)), exchange=Gather())
    ranked = Ranked(method, RANKS)
    ranked.run()
    payload = 4 * numel(toy_layout())
    for i in range(3):
        seats = list(ranked.ranges.seats(i))
        packets = sum(ranked.sent[s] for s in seats) - 2 * payload
        assert packets % HEADER_BYTES == 0 and packets > 0


def test_a_lost_piece_is_a_skipped_exchange_on_both_sides():
    method = replace(gasloc(setting(2), topology="one_peer"), deadline_s=1.0)
    both = {(1, 3), (3, 1)}  # worker 0 has seats 0 and 1, worker 1 seats 2, 3 and 4
    ranked = Ranked(method, (2, 3), lose=lambda src, dst, tag: (src, dst) in both and tag // 8 == 1)
    ranked.run()
    absent = {(r["round"], s): r.get("absent") for s, r in ranked.notes if r["kind"] == "round"}
    assert all(absent[2, s] == [1 if s < 2 else 0] for s in range(5))
    assert all(absent[t, s] is None for t in (1, 3, 4) for s in range(5))


def test_resume_is_the_uninterrupted_run():
    method = replace(gasloc(setting(), topology="two_peer"), cadence=Cadence(overlap=1))
    whole = Ranked(method, RANKS)
    want = whole.run()
    half = Ranked(method, RANKS)
    half.run(stop=2)
    again = Ranked(method, RANKS)
    for i in range(3):
        again.bodies[i].load_state(half.snapshots[2][half.ranges.seats(i)[0]][1])
    got = again.run(resume=[state for state, _ in half.snapshots[2]])
    assert all(equal(a.x, b.x) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "method, word",
    [
        (gasloc(setting(), codec="mod8"), "pair codec"),
        (replace(diloco(setting()), exchange=Ring()), "ring"),
        (replace(diloco(setting()), codec=Sign(), exchange=Shard(), feedback=Feedback(ends="mean")), "feedback at the mean"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused(method, word):
    with pytest.raises(BadInput, match=word):
        Ranked(method, RANKS)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 30))
def test_ranks_hold_everything_once(ranks, rows):
    tree = {"w": torch.zeros(rows, 3), "b": torch.zeros(rows)}
    ranges = Ranges(tuple(ranks), {k: len(v) for k, v in tree.items()})
    atoms = ranges.atoms(layout_of(tree))
    assert numel(atoms) == 4 * rows
    for worker, count in enumerate(ranks):
        assert [rows_of(rows, count, r)[0] for r in range(1, count)] == [rows_of(rows, count, r)[1] for r in range(count - 1)]
        held = [p for r in range(count) for p in ranges.held(atoms, worker, r) if p.size]
        assert sorted((p.name, p.lo, p.hi) for p in held) == sorted((p.name, p.lo, p.hi) for p in atoms)
        for r in range(count):
            assert {p.name for p in ranges.held(atoms, worker, r)} == {"w", "b"}


def test_fsdp_cuts_as_torch_chunk_does():
    for rows in range(1, 12):
        for ranks in range(1, 6):
            pieces = torch.arange(rows).chunk(ranks)
            for r in range(ranks):
                lo, hi = rows_of(rows, ranks, r)
                assert list(range(lo, hi)) == (pieces[r].tolist() if r < len(pieces) else [])


def test_marks_and_sketches_add_up_over_the_ranks():
    method, tree = gasloc(setting(), topology="two_peer"), toy_start(3)
    ranges = Ranges(RANKS, {k: len(v) for k, v in tree.items()})
    marks, sketches = [], []
    for worker in range(3):
        seats = [seat_of(method, ranges, s) for s in ranges.seats(worker)]
        mine = [shard(ranges, tree, worker, s.rank) for s in seats]
        marks.append(sum(core_ranges.mark(s.layout, [t]) for s, t in zip(seats, mine, strict=True)) % 2**64)
        sketches.append(sum(sketch_of_ranges(t, s.layout, s.whole) for s, t in zip(seats, mine, strict=True)))
    assert len(set(marks)) == 1
    for found in sketches:
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(sketch(tree)), rtol=0, atol=1e-5)
    tree["hidden"][2, 1] += 1e-3
    assert (
        sum(core_ranges.mark(seat_of(method, ranges, s).layout, [shard(ranges, tree, *ranges.place(s))]) for s in ranges.seats(2)) % 2**64
        != marks[0]
    )

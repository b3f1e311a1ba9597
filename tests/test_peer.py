"""The round loop under trouble: refused contributions, foreign packets, stops, resumes, overlap."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lockstep import Lockstep
from toy import ToyBody, toy_start

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.exchange import Ring, Shard
from gossamer.core.inner import AdamW
from gossamer.core.plan import Plan, uniform
from gossamer.core.schedule import Constant
from gossamer.recipes import REGISTRY, Setting, diloco, gasloc, geomesh, local_dadam, local_sgd, sparse_loco
from gossamer.worker.packet import HEADER_BYTES, Header, blank, check, seal, unseal

ADAM = AdamW(lr=0.01)


def setting(n: int = 4, rounds: int = 4, inner=ADAM) -> Setting:
    return Setting(uniform(n, 3, 2, ToyBody.LENGTH), rounds=rounds, seed=3, inner=inner, schedule=Constant())


METHODS = {name: recipe(setting()) for name, recipe in REGISTRY.items() if name != "halos"} | {
    "gasloc_mixed": gasloc(setting(), momentum="mixed"),
    "gasloc_local": gasloc(setting(), momentum="local", outer_momentum=0.5),
    "geomesh_feedback": geomesh(setting(), error_feedback=True),
    "geomesh_shard": geomesh(setting(), exchange="shard"),
    "geomesh_overlap": geomesh(setting(), overlap=0.5),
    "geomesh_unequal": geomesh(replace(setting(), plan=Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH)), overlap=0.3),
    "diloco_overlap_shard": diloco(setting(), overlap=0.6),
    "diloco_ring": diloco(setting(), exchange="ring"),
}


@pytest.mark.parametrize("name", METHODS)
def test_resume_at_any_round_is_the_uninterrupted_run(name: str) -> None:
    method = METHODS[name]
    whole = Lockstep(method)
    want = whole.run()
    for stop in (1, method.rounds // 2, method.rounds - 1):
        got = Lockstep(method).run(resume=whole.snapshots[stop])
        for a, b in zip(got, want, strict=True):
            assert all(torch.equal(a.x[k], b.x[k]) for k in a.x), (name, stop)
            assert (a.round, a.tokens) == (b.round, b.tokens)


@pytest.mark.parametrize("name", METHODS)
def test_a_stop_and_its_resume_are_the_uninterrupted_run(name: str) -> None:
    method = METHODS[name]
    want = Lockstep(method).run()
    first = Lockstep(method)
    assert all(s.round == 2 for s in first.run(stop=2))
    got = Lockstep(method).run(resume=first.snapshots[2])
    assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(got, want, strict=True) for k in a.x)


def test_every_method_trains() -> None:
    for name, method in METHODS.items():
        run = Lockstep(method)
        run.run()
        losses = [n["loss"] for n in run.notes if n["kind"] == "round" and n["worker"] == 0]
        assert len(losses) == method.rounds and all(map(math.isfinite, losses)), name
        assert [n["round"] for n in run.notes if n["worker"] == 0 and n["kind"] == "round"] == list(range(1, method.rounds + 1)), name


@pytest.mark.parametrize("make", [diloco, geomesh, local_sgd, sparse_loco], ids=lambda f: f.__name__)
@pytest.mark.parametrize("exchange", ["gather", "shard", "ring"])
def test_a_poisoned_worker_is_refused_and_named_and_the_rest_step_without_it(make, exchange: str) -> None:
    method = make(setting(rounds=2))
    if exchange != "gather" and (exchange == "ring" and method.codec.lossy):
        with pytest.raises(BadInput, match="ring"):
            replace(method, exchange=Ring())
        return
    method = replace(method, exchange={"gather": method.exchange, "shard": Shard(), "ring": Ring()}[exchange])
    run = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=4 if i == 2 else None) for i in range(4)])
    states = run.run()
    assert all(torch.isfinite(v).all() for s in states for v in s.x.values())
    assert all(torch.equal(states[0].x[k], s.x[k]) for s in states for k in s.x), "the outer step is all or nothing"
    refused = {n["worker"]: n["refused"] for n in run.notes if n["round"] == 2}
    assert refused[2] == [2]
    if exchange != "ring":
        assert set(map(tuple, refused.values())) == {(2,)}
    assert all(n["refused"] == [] for n in run.notes if n["round"] == 1)


def test_with_overlap_a_refusal_is_noted_once_and_where_it_lands() -> None:
    run = Lockstep(diloco(setting(rounds=4), overlap=0.5), bodies=[ToyBody(i, ADAM, poison_at=1 if i == 2 else None) for i in range(4)])
    run.run()
    noted = {n["round"]: n["refused"] for n in run.notes if n["kind"] == "round" and n["worker"] == 2 and "refused" in n}
    assert noted == {2: [2], 3: [], 4: []}


def test_the_mean_is_over_the_weights_received() -> None:
    """Three good workers and a refused one step as the three alone would, each with a third."""
    start = setting(rounds=1)
    method = diloco(start, weights="uniform")
    got = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=1 if i == 3 else None) for i in range(4)]).run()[0].x
    three = diloco(replace(start, plan=uniform(3, 3, 2, ToyBody.LENGTH)), weights="uniform")
    want = Lockstep(three).run()[0].x
    assert all(torch.equal(got[k], want[k]) for k in got)


def test_gossip_drops_a_poisoned_drift_and_keeps_its_weight() -> None:
    method = gasloc(setting(rounds=2))
    run = Lockstep(method, bodies=[ToyBody(i, ADAM, poison_at=1 if i == 2 else None) for i in range(4)])
    states = run.run()
    assert all(torch.isfinite(v).all() for s in states for v in s.x.values())
    assert [n["refused"] for n in run.notes if n["worker"] == 2 and n["round"] == 1] == [[2]]


def test_when_everybody_is_refused_nobody_moves() -> None:
    run = Lockstep(diloco(setting(rounds=1)), bodies=[ToyBody(i, ADAM, poison_at=0) for i in range(4)])
    assert all(torch.equal(s.x[k], v) for s in run.run() for k, v in toy_start().items())


def test_a_sudden_explosion_is_refused() -> None:
    method = diloco(setting(rounds=8))
    bodies = [ToyBody(i, ADAM) for i in range(4)]
    original = bodies[1].take

    def explode() -> None:
        original()
        if bodies[1].cursor == 20:
            bodies[1].params["out"].data.mul_(1e6)

    bodies[1].take = explode  # type: ignore[method-assign]
    run = Lockstep(method, bodies=bodies)
    run.run()
    assert {n["round"]: n["refused"] for n in run.notes if n["worker"] == 0} == {t: [1] if t == 7 else [] for t in range(1, 9)}


def test_unlike_starts_are_refused_and_sync_from_mends_them() -> None:
    starts = [toy_start(seed=int(i == 1)) for i in range(4)]
    for method in (diloco(setting()), gasloc(setting())):
        with pytest.raises(RunFailed, match=r"starts from other parameters.*sync_from"):
            Lockstep(method, x0=starts).run()
        mended = Lockstep(replace(method, sync_from=0), x0=[toy_start(seed=int(i == 1)) for i in range(4)]).run()
        plain = Lockstep(method).run()
        assert all(torch.equal(a.x[k], b.x[k]) for a, b in zip(mended, plain, strict=True) for k in a.x)


def test_replicas_that_drift_apart_raise_the_alarm() -> None:
    method = diloco(setting(), exchange="gather")
    whole = Lockstep(method)
    whole.run()
    snapshots = whole.snapshots[2]
    snapshots[3][0].x["bias"][0] += 1e-6
    with pytest.raises(RunFailed, match=r"drifted apart.*worker 3"):
        Lockstep(method).run(resume=snapshots)


def test_one_flipped_bit_changes_the_result() -> None:
    """The equality tests can fail: a decoded bit that differs is seen in the parameters."""

    def flip(i: int, j: int, tag: int, data: torch.Tensor) -> torch.Tensor:
        if (i, j, tag // 8) == (1, 0, 3):
            data[-5] ^= 16
            packet = Header(*Header(7, 3, 1, 0, *([0] * 5)))
            head = unseal_unchecked(data)
            return seal(data, head._replace(sender=packet.sender)).data
        return data

    def unseal_unchecked(data: torch.Tensor) -> Header:
        original = data.clone()
        original[-5] ^= 16
        return unseal(original).header

    method = geomesh(setting())
    want, got = Lockstep(method).run(), Lockstep(method, wire=flip).run()
    assert any(not torch.equal(want[0].x[k], got[0].x[k]) for k in want[0].x)
    assert all(torch.equal(want[1].x[k], got[1].x[k]) for k in want[1].x)


def test_a_damaged_payload_is_refused() -> None:
    def damage(i: int, j: int, tag: int, data: torch.Tensor) -> torch.Tensor:
        data[-1] ^= 1
        return data

    with pytest.raises(RunFailed, match="damaged"):
        Lockstep(diloco(setting()), wire=damage).run()


def test_foreign_packets_are_refused_by_name() -> None:
    header = Header(run_id=1, round=2, sender=3, kind=0, codec_id=5, codec_version=1, layout=9, digest=0, tokens=10)
    packet = unseal(seal(blank(8), header).data)
    assert packet.header == header and packet.nbytes == HEADER_BYTES + 8
    good = {"run_id": 1, "round": 2, "sender": 3, "codec": (5, 1), "layout": 9}
    check(packet, **good)
    for key, value, word in (
        ("run_id", 2, "run id"), ("round", 3, "round"), ("codec", (5, 2), "codec"), ("layout", 8, "layout"), ("sender", 1, "sender"),
    ):  # fmt: skip
        with pytest.raises(RunFailed, match=word):
            check(packet, **(good | {key: value}))
    for broken, word in ((torch.zeros(10, dtype=torch.uint8), "shorter"), (torch.zeros(80, dtype=torch.uint8), "not a Gossamer")):
        with pytest.raises(RunFailed, match=word):
            unseal(broken)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(gasloc(setting()), codec=geomesh(setting()).codec), "exchanges parameters"),
        (lambda: replace(local_sgd(setting()), codec=geomesh(setting()).codec), "exchanges parameters"),
        (lambda: replace(diloco(setting()), rounds=0), "at least 1"),
        (lambda: replace(geomesh(setting()), exchange=Ring()), "lossy"),
        (lambda: replace(gasloc(setting()), exchange=Shard()), "complete topology"),
        (lambda: replace(local_dadam(setting()), cadence=geomesh(setting(), overlap=0.5).cadence), "overlap"),
        (lambda: diloco(setting(), overlap=1.1), "from 0 to 1"),
        (lambda: replace(diloco(setting()), feedback=geomesh(setting(), error_feedback=True).feedback), "lossless"),
        (lambda: replace(diloco(setting()), topology=gasloc(setting(n=5)).topology), "topology for 5"),
        (lambda: gasloc(setting(n=5), topology="one_peer", perfect=True), "odd|even"),
        (lambda: Setting(uniform(4, 0, 2, 8), rounds=1), "H|steps"),
    ],
)
def test_compositions_that_cannot_work_are_refused(build, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build()


def test_overlap_lands_the_agreed_parameters() -> None:
    """One worker, plain averaging: the block that lands is the one that was done, so overlap changes nothing."""
    plain = local_sgd(setting(n=1))
    overlapped = replace(plain, cadence=geomesh(setting(n=1), overlap=0.5).cadence)
    a, b = Lockstep(plain).run()[0].x, Lockstep(overlapped).run()[0].x
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)

"""A star over one worker: the bits of the direct exchange in every world, the bytes that are declared, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lockstep import Lockstep
from net_toys import in_threads
from small_runs import corpus, flags, settings
from test_net_bits import SETTING, UNEQUAL, N, same, trained
from test_predict import CHARGED, job, near
from test_sim_bits import setting as sim_setting
from test_sim_bits import simulated
from toy import ToyBody, toy_layout, toy_start
from wires import over_memory

from gossamer.app import fleets
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.exchange import Gather as Direct
from gossamer.core.exchange import Hub
from gossamer.core.matching import Rates
from gossamer.core.method import Method
from gossamer.core.star import best_connected, middle
from gossamer.core.topology import TwoPeer
from gossamer.recipes import Setting, ddp, diloco, gasloc, geomesh, local_sgd, streaming_diloco
from gossamer.recipes.sync import sparse_loco
from gossamer.train import checkpoint
from gossamer.worker.effects import Compute, Gather, Send, SiteSum
from gossamer.worker.packet import HEADER_BYTES
from gossamer.worker.peer import peer, start
from gossamer.worker.ranks import check_ranks
from gossamer.worker.seat import Seat

RECIPES: dict[str, Callable[[Setting], Callable[..., Method]]] = {
    "diloco": lambda s: partial(diloco, s),
    "diloco_overlap": lambda s: partial(diloco, s, overlap=0.5),
    "diloco_eager": lambda s: partial(diloco, s, overlap=0.5, eager=True),
    "diloco_fp16": lambda s: partial(diloco, s, codec="fp16"),
    "diloco_int8": lambda s: partial(diloco, s, codec="int8"),
    "streaming": lambda s: partial(streaming_diloco, s, fragments=2),
    "local_sgd": lambda s: partial(local_sgd, s),
    "ddp": lambda s: partial(ddp, s),
    "geomesh": lambda s: partial(geomesh, s),
    "geomesh_overlap": lambda s: partial(geomesh, s, overlap=0.3, error_feedback="worker"),
    "sparse": lambda s: partial(sparse_loco, s),
}
MEANS = {"diloco", "diloco_fp16", "diloco_overlap", "diloco_eager", "local_sgd", "ddp", "streaming"}
"""Where the hub sends a mean, four workers taken: float32 is less than three packets."""


def pair(name: str, hub: int = 1, unequal: bool = False) -> tuple[Method, Method]:
    """The method by a star, and directly."""
    recipe = RECIPES[name](UNEQUAL if unequal else SETTING)
    return recipe(exchange="hub", hub=hub), recipe(exchange="gather")


@pytest.mark.parametrize(("name", "hub"), [*((name, 1) for name in RECIPES), ("diloco", 0), ("geomesh", 3)])
def test_a_star_has_the_bits_of_the_direct_exchange_and_the_bytes_that_it_declares(name: str, hub: int) -> None:
    star, direct = pair(name, hub, unequal=name in ("geomesh", "local_sgd", "diloco_int8"))
    stars, gathers = Lockstep(star), Lockstep(direct)
    assert same(stars.run(), gathers.run())
    layouts = [part.layout for part in Seat(0, star, toy_layout()).fragments]
    codec, n, rounds = star.codec, star.n, star.rounds
    said = sum(HEADER_BYTES + codec.nbytes(layout) for layout in layouts)
    handed = [star.exchange.hands(codec, layout, n, HEADER_BYTES) for layout in layouts]  # type: ignore[union-attr]
    assert all((len(sizes) == n) == (name in MEANS) for sizes in handed)
    want = [rounds * said] * n
    want[hub] = rounds * (n - 1) * sum(map(sum, handed))
    assert stars.sent == want
    declared = sum(star.exchange.sent_bytes(codec, layout, n - 1, n, HEADER_BYTES) for layout in layouts)
    assert declared == pytest.approx(sum(want) / n / rounds, abs=len(layouts))
    told = [sorted((r for r in world.notes if r["kind"] == "round"), key=lambda r: (r["round"], r["worker"])) for world in (stars, gathers)]
    for a, b in zip(*told, strict=True):
        assert [a.get(k) for k in ("refused", "weights", "tokens", "loss")] == [b.get(k) for k in ("refused", "weights", "tokens", "loss")]


@pytest.mark.parametrize("name", ["diloco", "diloco_eager", "streaming", "geomesh_overlap"])
def test_real_and_simulated_stars_have_those_bits_too(name: str) -> None:
    star, _ = pair(name)
    plain = Lockstep(star)
    want = plain.run()
    got = trained(star, within=partial(in_threads, group_of=over_memory(N)))
    assert same([final for final, _, _ in got], want)
    assert [account.bytes_sent for _, account, _ in got] == plain.sent
    star = RECIPES[name](sim_setting())(exchange="hub", hub=2)
    plain = Lockstep(star)
    want = plain.run()
    seen = simulated(star, [ToyBody(i, star.inner) for i in range(N)])
    assert same([state for state in seen.final if state], want)
    assert [account.bytes_sent for account in seen.accounts] == plain.sent
    bare = simulated(star, None)
    assert [account.bytes_sent for account in bare.accounts] == plain.sent and bare.events == seen.events


def test_over_gloo_a_star_has_those_bits() -> None:
    star, _ = pair("diloco")
    assert same([final for final, _, _ in trained(star)], Lockstep(star).run())


@pytest.mark.parametrize("name", ["diloco_overlap", "diloco_eager", "geomesh_overlap"])
def test_with_an_exchange_in_flight_a_stopped_and_resumed_run_has_the_bits_of_one_that_was_not(name: str) -> None:
    star = replace(pair(name)[0], rounds=6)
    want = Lockstep(star).run()
    first = trained(star, ask_at=2, within=partial(in_threads, group_of=over_memory(N)))
    assert {final.round for final, _, _ in first} < {3, 4, 5}
    second = trained(star, resume=[saved for _, _, saved in first], within=partial(in_threads, group_of=over_memory(N)))
    assert same([final for final, _, _ in second], want)


@pytest.mark.parametrize("name", ["diloco", "geomesh"])
@pytest.mark.parametrize("hub", [0, 2])
def test_a_boundary_between_the_two_phases_is_saved_and_taken_up_again(name: str, hub: int, tmp_path: Path) -> None:
    """Two fragments: the first one's hub has handed on when the round ends, and what it handed on is in the checkpoint."""
    star = replace(RECIPES[name](SETTING)(exchange="hub", hub=hub, fragments=2, overlap=0.9), rounds=5)
    want = Lockstep(star).run()
    first = Lockstep(star)
    first.run(stop=2)
    parts = []
    for i, (state, kept) in enumerate(first.snapshots[2]):
        met = [stream.pending.met for stream in state.streams if stream.pending]
        assert any(met) and not all(met), "one has met, one has not"
        if i == hub:
            assert all(len(m.handed) == N for m in met if m)
        sha = checkpoint.write_part(tmp_path, 2, i, state, {}, {})
        checkpoint.close(tmp_path, 2, state.tokens, {i: sha})
        back = checkpoint.read_part(tmp_path, 2, i, torch.device("cpu")).state
        parts.append((back, kept))
    assert same(Lockstep(star).run(resume=parts), want)


def test_a_refused_contribution_carries_no_weight_over_a_star_either() -> None:
    for name in ("diloco", "geomesh"):
        star, direct = pair(name)
        finals = [
            Lockstep(m, bodies=[ToyBody(i, m.inner, poison_at=4 if i == 2 else None) for i in range(N)]).run() for m in (star, direct)
        ]
        assert same(*finals)


def test_all_know_whose_was_refused_and_the_mean_alone_does_not_tell() -> None:
    star, _ = pair("diloco")
    world = Lockstep(star, bodies=[ToyBody(i, star.inner, poison_at=4 if i == 2 else None) for i in range(N)])
    world.run()
    assert {(r["worker"], tuple(r["refused"])) for r in world.notes if r["refused"]} == {(i, (2,)) for i in range(N)}


def test_what_the_hub_hands_on_wrong_is_refused() -> None:
    """A replica that has drifted apart is named by everybody, not by the hub alone; and a packet handed on twice is missed."""
    for name in ("diloco", "geomesh"):
        star, _ = pair(name)
        starts = [toy_start(seed=1 if i == 2 else 0) for i in range(N)]
        with pytest.raises(RunFailed, match="starts from other parameters"):
            Lockstep(star, x0=starts).run()


def test_a_packet_that_the_hub_hands_on_twice_is_missed() -> None:
    star, _ = pair("geomesh", hub=0)
    seat = Seat(1, star, toy_layout(), run_id=7)
    state = start(seat, toy_start())
    program = peer(seat, state)

    def answered() -> None:
        reply, said = None, None
        while True:
            effect, reply = program.send(reply), None
            if isinstance(effect, Compute):
                reply = ToyBody(1, star.inner).compute(effect.work)
            elif isinstance(effect, SiteSum):
                reply = effect.value
            elif isinstance(effect, Send):
                said = effect.packet
            elif isinstance(effect, Gather):
                assert said is not None
                reply = {0: said._replace(header=said.header._replace(sender=0))}

    with pytest.raises(RunFailed, match=r"the hub, has handed on no packet of worker\(s\) \[2, 3\]"):
        answered()


@pytest.mark.parametrize("n", [1, 2])
def test_the_smallest_stars(n: int) -> None:
    few = Setting(replace(SETTING.plan, steps=(3,) * n, batch=(2,) * n), rounds=3, seed=3, schedule=SETTING.schedule)
    for recipe in (diloco, geomesh):
        star, direct = recipe(few, exchange="hub", hub=0), recipe(few, exchange="gather")
        stars = Lockstep(star)
        assert same(stars.run(), Lockstep(direct).run())
        assert n > 1 or stars.sent == [0]


@pytest.mark.parametrize("name", ["diloco", "geomesh"])
@pytest.mark.parametrize("members", [[0, 2, 3], [1, 3]])
def test_without_its_hub_a_star_has_another_one(name: str, members: list[int]) -> None:
    ends = []
    for m in pair(name, hub=1):
        seats, states = [Seat(i, m, toy_layout(), run_id=7) for i in range(N)], []
        for seat in seats:
            state = start(seat, toy_start())
            state.roll.enter(0, frozenset(range(N)).difference(members))
            states.append((state, ToyBody(seat.me, m.inner).state()))
        world = Lockstep(m)
        ends.append([state for state in world.run(resume=states, members=members) if state])
    assert len(ends[0]) == len(members) and same(*ends)
    assert m.n == N and not same(ends[0], [replace(state, x=toy_start()) for state in ends[0]])


def test_the_hub_that_takes_over_is_the_best_connected_of_those_who_are_there() -> None:
    """Worker 2 is best connected, then 1; 0 is the lowest, on the slowest line. All of them see the same one, and the bits stay."""
    fast = (900.0, 900.0, 900.0, 900.0)
    rates = Rates((100.0, 500.0, 900.0, 300.0), fast, (0, 1, 2, 3), (fast,) * 4)
    setting = replace(SETTING, rates=lambda: rates)
    star, direct = diloco(setting, exchange="hub"), diloco(setting, exchange="gather")
    assert isinstance(star.exchange, Hub) and star.exchange.at == 2
    for members, hub in (([0, 1, 3], 1), ([0, 3], 0), ([0, 1, 2], 2)):
        ends, sent = [], []
        for m in (star, direct):
            states = []
            for i in range(N):
                state = start(Seat(i, m, toy_layout(), run_id=7), toy_start())
                state.roll.enter(0, frozenset(range(N)).difference(members))
                states.append((state, ToyBody(i, m.inner).state()))
            world = Lockstep(m)
            ends.append([state for state in world.run(resume=states, members=members) if state])
            sent.append(world.sent)
        assert same(*ends)
        if len(members) > 2:
            assert max(range(N), key=lambda i: sent[0][i]) == hub
        assert middle(star.exchange, star.codec, tuple(members)) == hub


# --- who is the hub, and what it costs


def test_the_best_connected_is_where_the_slowest_way_in_and_out_is_quickest() -> None:
    good, poor = 1000.0, 50.0
    links = tuple(tuple(good if 2 in (a, b) else poor for b in range(4)) for a in range(4))
    lines = (900.0,) * 4
    assert best_connected(Rates(lines, lines, (0, 1, 2, 3), links), 3.0) == 2
    same_links = tuple((good,) * 4 for _ in range(4))
    assert best_connected(Rates(lines, lines, (0, 1, 2, 3), same_links), 3.0) == 0, "a tie: the lowest"
    assert best_connected(Rates((100.0, 900.0, 900.0), (900.0,) * 3, (0, 1, 2), same_links), 2.0) == 1, "not behind a slow uplink"
    assert best_connected(Rates((900.0,), (900.0,), (0,), ((1.0,),)), 0.0) == 0


@pytest.mark.parametrize("name", ["geomesh", "diloco", "overlap", "fragments"])
@pytest.mark.parametrize("fleet", ["azure-4", "straggler-8", "uniform-16"])
def test_the_formula_is_within_a_tenth_of_the_simulator_for_a_star(fleet: str, name: str) -> None:
    asked = {
        "geomesh": ("method.name=geomesh",),
        "diloco": ("method.name=diloco",),
        "overlap": ("method.name=geomesh", "method.overlap=0.5"),
        "fragments": ("method.name=diloco", "method.overlap=0.3", "method.fragments=2"),
    }[name]
    near(job(fleet, *asked, "method.exchange=hub"))


def test_the_plan_knows_what_a_star_leaves_unhidden() -> None:
    """Balanced with it, a round is no slower than by speeds alone."""
    sets = ("method.name=diloco", "method.exchange=hub", *CHARGED)
    balanced, plain = (job("azure-4", *sets, f"plan.name={name}") for name in ("awb", "proportional"))
    assert isinstance(balanced.method.exchange, Hub)
    assert balanced.method.plan != plain.method.plan


def test_a_fleet_names_its_hub_and_a_setting_without_fleet_must_be_told() -> None:
    for name in ("diloco", "geomesh"):
        exchange = job("home", f"method.name={name}", "method.exchange=hub").method.exchange
        assert isinstance(exchange, Hub)
        fleet = fleets.load("home")
        assert fleet.site(exchange.at).up_mbps == max(fleet.site(i).up_mbps for i in range(fleet.n))
    with pytest.raises(BadInput, match="name the hub"):
        diloco(SETTING, exchange="hub")
    with pytest.raises(BadInput, match="hub = 2 names the worker in the middle"):
        diloco(SETTING, hub=2)
    with pytest.raises(BadInput, match="workers are 0 to 3"):
        diloco(SETTING, exchange="hub", hub=4)


def test_what_does_not_go_with_a_star_is_refused() -> None:
    with pytest.raises(BadInput, match="exchange hub needs the complete topology"):
        replace(gasloc(SETTING), exchange=Hub(0))
    with pytest.raises(BadInput, match="exchange hub needs the complete topology"):
        replace(gasloc(SETTING), exchange=Hub(0), topology=TwoPeer(N, 0))
    with pytest.raises(BadInput, match="at the mean"):
        geomesh(SETTING, exchange="hub", hub=0, error_feedback="both")
    with pytest.raises(BadInput, match="exchange hub"):
        check_ranks(diloco(SETTING, exchange="hub", hub=0))
    assert isinstance(diloco(SETTING, exchange="gather").exchange, Direct)


def test_whole_runs_of_a_star_and_of_the_direct_exchange_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    text = corpus(tmp_path / "text")
    found = {}
    for exchange in ("hub", "gather"):
        out = tmp_path / exchange
        sets = settings(text, method__name='"geomesh"', method__exchange=f'"{exchange}"', fleet__name='"azure-4"', run__rounds=2)
        assert main(["simulate", "--out", str(out), *flags(sets)]) == 0
        found[exchange] = json.loads((out / "summary.json").read_text())
    assert found["hub"]["params_sha256"] == found["gather"]["params_sha256"]
    assert max(found["hub"]["bytes_sent"]) == 3 * max(found["gather"]["bytes_sent"])
    assert main(["plan", *flags(sets), "--set", "method.exchange=hub"]) == 0

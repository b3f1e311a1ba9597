"""The simulated world of asynchronous tiers: servers' mail and places, what is refused, and whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sim_toys import Links, Times, packet
from small_runs import flags, settings
from toy import ToyBody

from gossamer.app import fleets
from gossamer.app.config import load
from gossamer.app.grids.compare import check_comparable
from gossamer.app.job import resolve
from gossamer.app.planning.timing import time_only
from gossamer.cli import main
from gossamer.core.cadence import Cadence
from gossamer.core.codec import Sign
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.exchange import Shard
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.plan import uniform
from gossamer.core.tiers import DelayedNesterov, Tiers, hosts
from gossamer.recipes import Setting, halos
from gossamer.sim.driver import Simulation
from gossamer.sim.seats import SeatNetwork
from gossamer.worker.effects import Boundary, RecvAny, Send
from gossamer.worker.server import TO_SERVER
from gossamer.worker.state import State

pytestmark = pytest.mark.usefixtures("cache")


def test_any_message_is_the_earliest_and_then_the_lowest_senders() -> None:
    heard: list[int] = []

    def server() -> Any:
        yield Boundary(0, State(x={}))
        for _ in range(6):
            frm, _ = yield RecvAny(TO_SERVER)
            heard.append(frm)
        return State(x={})

    def sender(me: int) -> Any:
        for t in range(2):
            yield Send((3,), TO_SERVER, packet(me, t, 10))
        return State(x={})

    Simulation(
        [sender(i) for i in range(3)] + [server()],
        None,
        Links(lambda src, dst, nbytes: 1.0 if src else 2.0),
        Times(0, 0, 0, 0),
        None,
        sequence=1,
        servers=1,
    ).run()
    assert heard == [1, 1, 2, 2, 0, 0]


def test_only_servers_may_take_any_message_and_a_server_that_waits_for_ever_is_named() -> None:
    def asks() -> Any:
        yield RecvAny(TO_SERVER)
        return State(x={})

    with pytest.raises(RunFailed, match="only servers may"):
        Simulation([asks()], None, Links(lambda *_: 1.0), Times(0), None, sequence=1).run()
    with pytest.raises(RunFailed, match="server 0 waits for anybody"):
        Simulation([asks()], None, Links(lambda *_: 1.0), Times(0), None, sequence=1, servers=1).run()


GPU = Gpu("card", 1.0, 16.0)
PLACES = Fleet(
    "places",
    (
        Site("a", "east", GPU, 100.0, 100.0, workers=2),
        Site("b", "east", GPU, 100.0, 100.0),
        Site("c", "west", GPU, 100.0, 100.0),
        Site("d", "south", GPU, 100.0, 100.0),
    ),
    {
        (x, y): Link({"westsouth": 90.0, "southwest": 90.0, "eastwest": 50.0}.get(x + y, 40.0), 10.0)
        for x in ("east", "west", "south")
        for y in ("east", "west", "south")
    },
    local=Link(1000.0, 1.0),
)


def test_servers_stand_with_their_regions_and_the_global_one_where_links_are_best() -> None:
    rule = DelayedNesterov(1.0, 0.0, 1)
    assert hosts(PLACES, Tiers((0, 0, 0, 1, 2), rule, rule)) == (0, 1, 2, 3, 4, 0, 3, 4, 3)
    azure = fleets.load("azure-4")
    assert len(hosts(azure, Tiers((0, 1, 2, 3), rule, rule))) == 9


@pytest.mark.parametrize("sharing", ["queue", "fair"])
def test_within_a_site_the_local_link_is_charged_and_between_sites_their_links(sharing: Any) -> None:
    rule = DelayedNesterov(1.0, 0.0, 1)
    network = SeatNetwork(PLACES, hosts(PLACES, Tiers((0, 0, 0, 1, 2), rule, rule)), sharing=sharing)

    def alone_s(key: int, src: int, dst: int, nbytes: int) -> float:
        events, now = list(network.launch(100.0 * key, key, src, dst, nbytes)), 0.0
        while events:
            events.sort()
            now, k, version = events.pop(0)
            delivered, later = network.finish(now, k, version)
            events += later
            if delivered:
                return now - 100.0 * key
        raise AssertionError

    b = 1_250_000  # 10 Mbit
    assert alone_s(0, 0, 5, b) == pytest.approx(0.01 + 0.001), "worker 0 to the server at its site: 1000 Mbit/s, 1 ms"
    assert alone_s(1, 1, 5, b) == pytest.approx(0.01 + 0.001)
    assert alone_s(2, 2, 5, b) == pytest.approx(0.25 + 0.01), "another site of the region: 40 Mbit/s"
    assert alone_s(3, 6, 8, b) == pytest.approx(0.01 + 0.001), "a local server to the global one beside it"
    assert alone_s(4, 5, 8, b) == pytest.approx(0.2 + 0.01), "east to west: 50 Mbit/s"
    assert alone_s(5, 7, 8, b) == pytest.approx(10 / 90 + 0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": Sign()}, "lossy codec"),
        ({"cadence": Cadence(0.5)}, "overlap"),
        ({"exchange": Shard()}, "exchange between the workers"),
        ({"weights": "tokens"}, "weights 'tokens'"),
        ({"sync_from": 0}, "sync_from"),
        ({"plan": uniform(3, 1, 1, 8)}, "workers"),
    ],
)
def test_what_does_not_go_with_servers_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        replace(halos(Setting(uniform(4, 4, 2, ToyBody.LENGTH), 3)), **change)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block", 0), ("local_lr", 0.0), ("global_lr", -1.0), ("local_momentum", 1.0), ("global_momentum", -0.1), ("local_delay", 0),
        ("global_delay", 0), ("merge", 0.0), ("merge", 1.5), ("report_every", 0),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(BadInput, match=str(value)):
        halos(Setting(uniform(2, 4, 2, 8), 3), **{option: value})


def test_regions_and_speeds_are_one_a_worker() -> None:
    with pytest.raises(BadInput, match="2 speeds for 4 workers"):
        Setting(uniform(4, 4, 2, 8), 3, speeds=(1.0, 2.0))
    with pytest.raises(BadInput, match="in the order"):
        halos(Setting(uniform(2, 4, 2, 8), 3, regions=(1, 0)))


# --- whole runs


def test_a_simulated_run_learns_reports_and_is_not_resumed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = settings(text, method__name="halos", fleet__name='"azure-4"', run__rounds=10, plan__steps=4)
    sets += [
        "method.report_every=3",
        "method.local_delay=2",
        "method.local_lr=1.4",
        "method.global_lr=1.0",
        "method.block=2",
        "inner.lr=3e-3",
    ]
    out = tmp_path / "run"
    assert main(["simulate", "--out", str(out), *flags(sets)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if r["kind"] == "eval"]
    blocks = resolve(load([], sets)).method.rounds
    assert summary["rounds"] == blocks and abs(len(evals) - 11) <= 1
    assert evals[-1]["round"] == blocks and summary["final_loss"] == evals[-1]["loss"] < evals[0]["loss"] < 6.0
    assert summary["straggler_idle"]["mean"] == 0.0 and len(summary["utilisation"]["workers"]) == 4
    assert summary["tokens"] == pytest.approx(10 * 4 * 4 * 2 * 16, rel=0.02)
    assert not (out / "checkpoints").exists() or not any((out / "checkpoints").iterdir())
    bare, _ = time_only(resolve(load([], sets)))
    assert bare["wall_s"] == pytest.approx(summary["wall_s"], rel=1e-12)
    (out / "summary.json").unlink()
    capsys.readouterr()
    assert main(["simulate", "--resume", str(out)]) == 2
    assert "keeps no checkpoints" in capsys.readouterr().err


def test_checkpoints_are_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = flags(settings(text, method__name="halos", fleet__name='"uniform-2"'))
    assert main(["simulate", "--out", str(tmp_path / "sim"), *given, "--set", "checkpoint.every=5"]) == 2
    assert "checkpoint.every = 5" in capsys.readouterr().err and not (tmp_path / "sim").exists()


@pytest.mark.parametrize("fleet", ["azure-4", "halos-16", "straggler-8", "uniform-3"])
def test_every_fleet_can_be_planned(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--set", "method.name=halos", "--set", f"fleet.name={fleet}"]) == 0
    assert "a worker sends" in capsys.readouterr().out


def test_blocks_that_do_not_fit_the_tokens_of_other_methods_are_told() -> None:
    """Equal plans and rounds would not make them comparable, so that is not what is asked for."""
    few = ("plan.steps=1", "fleet.name=uniform-2")
    for rounds, fits in ((1, False), (80, True)):
        jobs = [resolve(load([], [f"method.name={name}", f"run.rounds={rounds}", *few])) for name in ("diloco", "halos")]
        if fits:
            check_comparable(jobs)
        else:
            with pytest.raises(BadInput, match="more rounds, since halos takes whole blocks"):
                check_comparable(jobs)

"""Wide-area runs of real processes in which sites die, come late, leave and return, and the coordinator dies."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from small_runs import corpus
from test_wan_run import sets_of
from wan_run_toys import Field, field


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


def check_losses(run: Field, site: str, seat: int, rounds: int, gap: bool = False) -> None:
    """Every round once, and no jump."""
    mine = run.losses(site, seat)
    assert gap or sorted(mine) == list(range(1, rounds + 1))
    assert all(after < before + 0.4 for before, after in itertools.pairwise(mine.values())), mine


@pytest.mark.timeout(400)
def test_one_of_three_is_killed_and_comes_back_in_a_synchronous_method(text: Path, tmp_path: Path) -> None:
    rounds = 24
    sets = sets_of(text, 3, "diloco", run__rounds=rounds, clock__kill="[[2, 3]]", clock__pace_s=0.3)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.spare(4)
        run.join("lyon", "oslo", "porto")
        run.ends("porto", code=-signal.SIGKILL)
        run.says("lyon", r"site porto is gone")
        run.says("lyon", r"session 2, from round [34]: lyon, oslo\n")
        run.join("porto")
        run.ends("lyon", "oslo", "porto")
        assert "took the state after round" in run.log("porto")
        gone, came = run.records("lyon", lambda r: r["kind"] == "members")
        assert gone["absent"] == [2] and came["absent"] == [] and 3 <= gone["round"] < came["round"]
        summary = run.summary("lyon")
        assert summary["dead"] == [] and len(set(summary["params_sha256"])) == 1 and summary["rounds"] == rounds
        for seat in (0, 1):
            check_losses(run, "lyon", seat, rounds)
        check_losses(run, "lyon", 2, rounds, gap=True)


@pytest.mark.timeout(400)
def test_gossip_goes_on_without_the_dead_and_takes_in_who_comes_late(text: Path, tmp_path: Path) -> None:
    rounds = 24
    sets = sets_of(
        text, 4, "gasloc", run__rounds=rounds, clock__kill="[[1, 3]]", clock__pace_s=0.3, wan__founders=3, method__topology='"one_peer"'
    )
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.spare(4)
        run.join("lyon", "oslo", "porto")
        run.ends("oslo", code=-signal.SIGKILL)
        run.join("riga")
        run.says("riga", r"took the state after round")
        run.ends("lyon", "porto", "riga")
        summary = run.summary("lyon")
        assert summary["dead"] == [1] and summary["rounds"] == rounds
        assert [sha is None for sha in summary["params_sha256"]] == [False, True, False, False]
        for seat in (0, 2):
            check_losses(run, "lyon", seat, rounds)
        members = [r["absent"] for r in run.records("lyon", lambda r: r["kind"] == "members")]
        assert [1, 3] in members and members[-1] == [1]


@pytest.mark.timeout(400)
def test_leaving_waiting_below_the_least_and_a_coordinator_that_dies(text: Path, tmp_path: Path) -> None:
    rounds = 24
    sets = sets_of(text, 2, "diloco", run__rounds=rounds, clock__pace_s=0.2, checkpoint__every=4)
    with field(tmp_path / "wan", sets) as run:
        run.spare(4)
        run.join("lyon", "oslo")
        run.says("oslo", r"round 3/")
        run.kill("oslo", signal.SIGTERM)
        run.ends("oslo", code=128 + signal.SIGTERM)
        assert "site oslo has left run" in run.log("oslo")
        run.says("lyon", r"it needs 2; without oslo")
        run.kill("coordinator")
        run.ends("coordinator", code=-signal.SIGKILL)
        run.coordinator()
        run.join("oslo")
        run.ends("lyon", "oslo")
        summary = run.summary("lyon")
        assert summary["dead"] == [] and summary["rounds"] == rounds and len(set(summary["params_sha256"])) == 1
        for seat in (0, 1):
            check_losses(run, "lyon", seat, rounds)

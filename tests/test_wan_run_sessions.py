"""Wide-area runs of real processes in which sites die, come late, leave and return, and the coordinator dies."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path

import pytest
from test_wan_run import sets_of
from wan_run_toys import Field, field

from gossamer.core.tree import sha256
from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")


def check_losses(run: Field, site: str, seat: int, rounds: int) -> None:
    """Every round once, and no jump."""
    mine = run.losses(site, seat)
    assert sorted(mine) == list(range(1, rounds + 1))
    assert all(after < before + 0.4 for before, after in itertools.pairwise(mine.values())), mine


def check_own(run: Field, *sites: str) -> list[list[int]]:
    """Every site has every round from its first to its last once, and no jump in the loss. Returns whom the first noted as absent."""
    for site in sites:
        mine = [(r["round"], r["loss"]) for r in run.own(site) if r["kind"] == "round"]
        rounds = [t for t, _ in mine]
        assert rounds == list(range(rounds[0], rounds[-1] + 1)), (site, rounds)
        assert all(after < before + 0.4 for (_, before), (_, after) in itertools.pairwise(mine)), (site, mine)
    return [r["absent"] for r in run.own(sites[0]) if r["kind"] == "members"]


def last(run: Field, site: str, seat: int) -> tuple[int, str]:
    """Round and parameters of a site's own newest checkpoint."""
    folder = run.root / "runs" / site / "checkpoints"
    found = checkpoint.latest(folder)
    assert found is not None
    return found, sha256(checkpoint.read_part(folder, found, seat).state.x)


@pytest.mark.timeout(400)
def test_one_of_three_is_killed_and_comes_back_in_a_synchronous_method(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 3, "diloco", run__rounds=5000, clock__kill="[[2, 3]]", clock__pace_s=0.1, eval__every=50)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join("lyon", "oslo", "porto")
        run.ends("porto", code=-signal.SIGKILL)
        run.says("lyon", r"site porto is gone")
        run.says("lyon", r"session 2, from round [34]: lyon, oslo\n")
        run.trains("lyon", 3)
        run.join("porto")
        run.says("porto", "took the state after round")
        run.trains("porto", 3)
        run.stops("lyon", "oslo", "porto")
        assert check_own(run, "lyon", "oslo") == [[2], []]
        ends = {last(run, site, seat) for seat, site in enumerate(("lyon", "oslo", "porto"))}
        assert len(ends) == 1


@pytest.mark.timeout(400)
def test_gossip_goes_on_without_the_dead_and_takes_in_who_comes_late(text: Path, tmp_path: Path) -> None:
    more = {"clock__kill": "[[1, 3]]", "clock__pace_s": 0.1, "wan__founders": 3, "method__topology": '"one_peer"', "eval__every": 50}
    with field(tmp_path / "wan", sets_of(text, 4, "gasloc", run__rounds=5000, **more), tls=False) as run:
        run.join("lyon", "oslo", "porto")
        run.ends("oslo", code=-signal.SIGKILL)
        run.trains("lyon", 5)
        assert "session 2" not in run.log("lyon"), "nobody stops for a death"
        for site in ("lyon", "porto"):
            assert len(re.findall(r"^site oslo is gone \(.*\): the others go on without it$", run.log(site), re.MULTILINE)) == 1
        run.join("riga")
        run.says("riga", r"took the state after round")
        run.trains("riga", 3)
        run.join("oslo")
        run.says("lyon", "site oslo is back")
        run.trains("oslo", 3)
        run.stops("lyon", "oslo", "porto", "riga")
        assert check_own(run, "lyon", "porto") == [[1, 3], [1], []]
        assert len({last(run, site, seat)[0] for seat, site in enumerate(("lyon", "oslo", "porto", "riga"))}) == 1


@pytest.mark.timeout(400)
def test_leaving_waiting_below_the_least_and_a_coordinator_that_dies(text: Path, tmp_path: Path) -> None:
    rounds = 20
    sets = sets_of(text, 2, "diloco", run__rounds=rounds, clock__pace_s=0.1, checkpoint__every=4)
    with field(tmp_path / "wan", sets) as run:
        run.join("lyon", "oslo")
        run.says("oslo", r"round \d+/")
        run.kill("oslo", signal.SIGTERM)
        run.ends("oslo", code=128 + signal.SIGTERM)
        assert "stopping at the end of the round; once more ends at once" in run.log("oslo")
        assert re.search(r"site oslo has left run \S+ after round (\d+): there is a checkpoint of round \1 in ", run.log("oslo"))
        run.says("lyon", r"it needs 2 \(wan\.min_sites\); without oslo")
        run.says("lyon", r"(?m)^site oslo has left$")  # though no session opens without it
        run.kill("coordinator")
        run.ends("coordinator", code=-signal.SIGKILL)
        run.coordinator()
        run.join("oslo")
        run.ends("lyon", "oslo")
        assert [run.log("lyon").count(f"\nsite oslo {what}\n") for what in ("has left", "is back")] == [1, 1]
        summary = run.summary("lyon")
        assert summary["dead"] == [] and summary["rounds"] == rounds and len(set(summary["params_sha256"])) == 1
        for seat in (0, 1):
            check_losses(run, "lyon", seat, rounds)

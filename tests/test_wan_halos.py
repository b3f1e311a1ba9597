"""Methods with servers among sites: servers run in the processes of sites, over the same transport; deaths, and coming back."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path

import pytest
from test_wan_run import sets_of, simulated
from test_wan_run_faults import meets
from wan_run_toys import SITES, Field, field

from gossamer.app.folder import RunFolder

pytestmark = pytest.mark.usefixtures("cache")

REGIONS = {"lyon": "east", "oslo": "east", "porto": "west", "riga": "west"}


def two_regions(folder: Path, sites: tuple[str, ...]) -> Path:
    """A fleet of these sites."""
    one = '[[sites]]\nname = "{}"\nregion = "{}"\ngpu = "H100 80GB"\nup_mbps = 900\ndown_mbps = 900\n'
    regions = sorted({REGIONS[s] for s in sites})
    links = [f'[[links]]\nbetween = ["{a}", "{b}"]\nrate_mbps = 900\nrtt_ms = 10\n' for a in regions for b in regions if a <= b]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fleet.toml"
    path.write_text('name = "two"\n\n' + "\n".join([one.format(s, REGIONS[s]) for s in sites] + links))
    return path


def halos_sets(text: Path, fleet: Path, sites: tuple[str, ...], **more: object) -> list[str]:
    base: dict[str, object] = {
        "fleet__name": f'"{fleet}"', "run__rounds": 12, "method__report_every": 1, "wan__sites": json.dumps(sites),
        "method__block": 2, "method__local_delay": 2, "method__local_lr": 1.4, "method__global_lr": 1.0, "inner__lr": 3e-3,
        "wan__deadline_s": 30.0,  # who is silent for 5 s while all processes start is not taken for gone
    }  # fmt: skip
    return sets_of(text, len(sites), "halos", **(base | more))


@pytest.mark.timeout(300)
def test_sites_of_two_regions_come_to_the_end_and_tell_of_everybody(text: Path, tmp_path: Path) -> None:
    """With certificates. Servers of both regions and the global one, none of them a process of its own."""
    sites = SITES[:3]
    sets = halos_sets(text, two_regions(tmp_path, sites), sites, clock__pace_s=0.05)
    with field(tmp_path / "wan", sets) as run:
        run.join(*sites)
        run.ends(*sites)
        assert "the server of region east and the global server begin here, from round 0" in run.log("lyon")
        assert "the server of region west begins here, from round 0" in run.log("porto") and "begin" not in run.log("oslo")
        got, want = run.summary("lyon"), simulated(sets, tmp_path / "sim")
        for key in ("tokens", "rounds", "dead", "bytes_sent"):
            assert got[key] == want[key], key
        assert len(got["params_sha256"]) == 1 and run.summary("porto") == got
        evals = run.records("lyon", lambda r: r["kind"] == "eval")
        assert {r["worker"] for r in evals} == {"fleet"} and max(r["round"] for r in evals) == got["rounds"]
        assert got["final_loss"] == evals[-1]["loss"]
        assert {(r["worker"], r["round"]) for r in run.records("lyon", lambda r: r["kind"] == "round")} == {
            (i, t) for i in range(3) for t in range(1, got["rounds"] + 1)
        }


@pytest.mark.timeout(300)
def test_where_arrivals_have_one_order_the_bits_are_the_simulations(text: Path, tmp_path: Path) -> None:
    """One worker, its server and the global one."""
    sites = SITES[:1]
    sets = halos_sets(text, Path("uniform-1"), sites, clock__pace_s=0.7, wan__alone="true", wan__min_sites=1, run__rounds=6)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join(*sites)
        run.ends(*sites)
        got, want = run.summary("lyon"), simulated(sets, tmp_path / "sim")
        for key in ("params_sha256", "final_loss", "tokens", "bytes_sent", "bytes_received", "rounds"):
            assert got[key] == want[key], key


def losses(run: Field, seat: int) -> dict[int, float]:
    """Evaluations of the global server, wherever it was, by block."""
    found: dict[int, float] = {}
    for site in SITES:
        for folder in sorted((run.root / "runs" / site / "workers").glob("*")) if (run.root / "runs" / site).is_dir() else []:
            records = RunFolder(folder).read_lines("metrics.jsonl")
            found |= {r["round"]: r["loss"] for r in records if r["kind"] == "eval"}
    return dict(sorted(found.items()))


@pytest.mark.timeout(500)
def test_who_dies_is_gone_on_without_and_servers_begin_elsewhere(text: Path, tmp_path: Path) -> None:
    """A worker without a server; the site of a region's server; the site of the global one; each comes back."""
    sets = halos_sets(text, two_regions(tmp_path, SITES), SITES, run__rounds=1500, clock__pace_s=0.1)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join(*SITES)
        meets(run, "riga", "lyon", "oslo", "porto")
        run.trains("riga", 3)

        run.kill("oslo")
        run.ends("oslo", code=-signal.SIGKILL)
        run.trains("lyon", 3)
        run.trains("porto", 3)
        assert "session 2" not in run.log("lyon"), "nobody stops for the death of a worker"
        run.join("oslo")
        meets(run, "oslo", "lyon", "porto", "riga")
        run.trains("oslo", 2)
        assert "begin" not in run.log("oslo") and run.log("lyon").count("begin here") == 1, "servers stay where they are"

        run.kill("porto")
        run.ends("porto", code=-signal.SIGKILL)
        run.says("riga", "the server of region west, at site porto, is gone: its workers go on in the next session")
        run.says("riga", "the server of region west begins here")
        meets(run, "riga", "lyon", "oslo")
        run.trains("riga", 2)
        run.join("porto")
        meets(run, "porto", "lyon", "oslo", "riga")
        run.trains("porto", 2)
        assert run.log("porto").count("begins here") == 1, "the server stays with riga"

        before = losses(run, 0)
        run.kill("lyon")
        run.ends("lyon", code=-signal.SIGKILL)
        run.says("oslo", "(the global server|the server of region east), at site lyon, is gone")
        meets(run, "oslo", "porto", "riga")
        run.says("oslo", "the server of region east.* begin")
        until_s = time.monotonic() + 60
        while max(losses(run, 0)) < max(before) + 3:
            assert time.monotonic() < until_s, run.log("riga")
            time.sleep(0.2)
        run.join("lyon")
        meets(run, "lyon", "oslo", "porto", "riga")
        run.trains("lyon", 3)
        run.stops(*SITES)
        after = losses(run, 0)
        values = list(after.values())
        assert min(values[-3:]) < values[0] and all(b < a + 0.6 for a, b in itertools.pairwise(values)), after


@pytest.mark.timeout(400)
def test_a_run_that_all_have_left_goes_on_with_servers_as_they_were(text: Path, tmp_path: Path) -> None:
    """One worker, so that arrivals have one order: the bits of a run that was not interrupted. Then two, both of which are killed."""
    sets = halos_sets(text, Path("uniform-1"), SITES[:1], clock__pace_s=0.5, wan__alone="true", wan__min_sites=1, run__rounds=8)
    sets += ["method.local_delay=3", "method.report_every=2"]
    with field(tmp_path / "one", sets, tls=False) as run:
        run.join("lyon")
        run.trains("lyon", 3)
        run.stops("lyon")
        run.join("lyon")
        run.ends("lyon")
        assert "begin here" not in run.log("lyon").split("has left run")[1]
        got, want = run.summary("lyon"), simulated(sets, tmp_path / "sim")
        for key in ("params_sha256", "final_loss", "tokens", "rounds"):
            assert got[key] == want[key], key

    sites = SITES[:2]
    sets = halos_sets(text, two_regions(tmp_path, sites), sites, clock__pace_s=0.1, run__rounds=1500, checkpoint__every=2)
    with field(tmp_path / "two", sets, tls=False) as run:
        run.join(*sites)
        run.trains("oslo", 6)
        for site in sites:
            run.kill(site)
        run.ends(*sites, code=-signal.SIGKILL)
        run.join(*sites)
        found = [int(run.says(site, r"session [2-9], from round (\d+): lyon, oslo")) for site in sites]
        assert found[0] == found[1] >= 4
        run.trains("oslo", 3)
        run.stops(*sites)

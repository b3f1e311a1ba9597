"""A star among sites: the bits of its simulation, a leaf that dies, and the hub's site that dies."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from test_wan_run import check_same, sets_of, simulated
from test_wan_run_faults import meets
from test_wan_run_sessions import check_own, last
from wan_run_toys import SITES, Field, field

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.core.exchange import Hub

pytestmark = pytest.mark.usefixtures("cache")

UPLINKS = {"lyon": 50, "oslo": 400, "porto": 900, "riga": 300}


def unlike(folder: Path) -> Path:
    """A fleet in which porto is best connected, then oslo, then riga."""
    sites = [
        f'[[sites]]\nname = "{site}"\nregion = "r"\ngpu = "H100 80GB"\nup_mbps = {up}\ndown_mbps = 900\n' for site, up in UPLINKS.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "unlike.toml"
    path.write_text('name = "unlike"\n\n' + "\n".join(sites) + '\n[[links]]\nbetween = ["r", "r"]\nrate_mbps = 900\nrtt_ms = 10\n')
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["diloco", "geomesh"])
def test_a_star_of_sites_has_the_bits_of_its_simulation(method: str, text: Path, tmp_path: Path) -> None:
    """With certificates; signs are handed on as they are, float32 as a mean."""
    sets = sets_of(text, 4, method, method__exchange='"hub"', fleet__name=f'"{unlike(tmp_path)}"')
    assert resolve(load([], sets)).method.exchange == Hub(2, resolve(load([], sets)).method.exchange.rates)  # type: ignore[union-attr]
    with field(tmp_path / "wan", sets) as run:
        run.join(*SITES)
        run.ends(*SITES)
        check_same(run.summary("lyon"), simulated(sets, tmp_path / "sim"))
        sent = run.summary("lyon")["bytes_sent"]
        assert sent[2] > 2 * max(sent[i] for i in (0, 1, 3)), "all goes over porto"


def hub_of(run: Field, *sites: str) -> str:
    """Who sends the most, in a round from now on that all of these complete."""

    def told(site: str) -> dict[int, int]:
        return {r["round"]: r["bytes_sent"] for r in run.own(site) if r["kind"] == "round"}

    now, until_s = max(max(told(site), default=0) for site in sites), time.monotonic() + 90
    while not (common := [t for t in set.intersection(*(set(told(site)) for site in sites)) if t > now]):
        assert time.monotonic() < until_s, run.log(sites[0])
        time.sleep(0.1)
    return max(sites, key=lambda site: told(site)[min(common)])


@pytest.mark.timeout(400)
def test_a_leaf_dies_then_the_hub_and_then_it_comes_back(text: Path, tmp_path: Path) -> None:
    more = {"run__rounds": 5000, "clock__pace_s": 0.1, "eval__every": 50, "method__exchange": '"hub"'}
    sets = sets_of(text, 4, "diloco", fleet__name=f'"{unlike(tmp_path)}"', **more)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join(*SITES)
        meets(run, "lyon", "oslo", "porto", "riga")
        run.trains("lyon", 2)
        assert hub_of(run, *SITES) == "porto"
        run.kill("riga")
        run.ends("riga", code=-signal.SIGKILL)
        meets(run, "lyon", "oslo", "porto")
        run.trains("lyon", 2)
        assert hub_of(run, "lyon", "oslo", "porto") == "porto"
        run.join("riga")
        meets(run, "riga", "lyon", "oslo", "porto")
        run.kill("porto")
        run.ends("porto", code=-signal.SIGKILL)
        run.says("lyon", "site porto is gone")
        meets(run, "lyon", "oslo", "riga")
        run.trains("lyon", 3)
        assert hub_of(run, "lyon", "oslo", "riga") == "oslo", "the best-connected of those who are left, not the lowest"
        run.join("porto")
        meets(run, "porto", "lyon", "oslo", "riga")
        run.trains("porto", 3)
        assert hub_of(run, *SITES) == "porto"
        run.stops(*SITES)
        check_own(run, "lyon", "oslo")
        assert len({last(run, site, seat) for seat, site in enumerate(SITES)}) == 1

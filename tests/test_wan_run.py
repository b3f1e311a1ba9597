"""Wide-area runs of real processes with certificates: the bits of the simulation, sites that die, come, leave and return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import settings
from wan_run_toys import SITES, field

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.core.tree import sha256
from gossamer.train import weights

pytestmark = pytest.mark.usefixtures("cache")


def sets_of(text: Path, n: int, method: str, **more: object) -> list[str]:
    base: dict[str, object] = {
        "method__name": f'"{method}"', "fleet__name": f'"uniform-{n}"', "run__rounds": 4, "wan__sites": json.dumps(SITES[:n]),
        "wan__deadline_s": 12.0,
    }  # fmt: skip
    return settings(text, **(base | more))


def simulated(sets: list[str], out: Path) -> dict[str, Any]:
    return json.loads((simulate(resolve(load([], sets)), out, quiet=True).path / "summary.json").read_text())


def check_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["params_sha256"] == want["params_sha256"] and got["model_sha256"] == want["model_sha256"]
    assert got["bytes_sent"] == want["bytes_sent"]
    assert got["final_loss"] == want["final_loss"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["diloco", "geomesh", "gasloc"])
def test_a_run_of_sites_has_the_bits_of_its_simulation(method: str, text: Path, tmp_path: Path) -> None:
    n = 4 if method == "gasloc" else 3
    sets = sets_of(text, n, method, **({"method__topology": '"two_peer"'} if method == "gasloc" else {}))
    with field(tmp_path / "wan", sets) as run:
        run.join(*SITES[:n])
        run.ends(*SITES[:n])
        check_same(run.summary("lyon"), simulated(sets, tmp_path / "sim"))
        assert run.summary("oslo") == run.summary("lyon")
        names = run.summary("lyon")["worker_names"]
        assert sorted(names) == sorted(f"site {site}" for site in SITES[:n]), "by seat, and so as they came"
        assert json.loads((run.root / "runs" / "oslo" / "plan.json").read_text())["worker_names"] == names
        assert (run.root / "runs" / "lyon" / "report.html").is_file()
        models = [found for site in SITES[:n] if (found := weights.read(run.root / "runs" / site)) is not None]
        assert len(models) == (1 if method == "gasloc" else n)  # of gossip one site alone has the mean of all
        assert {sha256(found.tree) for found in models} == {run.summary("lyon")["model_sha256"]}
        if method == "diloco":  # the comparison can fail
            with pytest.raises(AssertionError):
                check_same(run.summary("lyon"), simulated([*sets, "seed=1"], tmp_path / "other"))


@pytest.mark.timeout(300)
def test_who_never_comes_is_absent_as_in_the_simulation(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 4, "diloco", wan__founders=3)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join("lyon", "porto", "riga")
        run.ends("lyon", "porto", "riga")
        got, want = run.summary("lyon"), simulated([*sets, "clock.kill=[[1, 0]]"], tmp_path / "sim")
        assert got["dead"] == want["dead"] == [1]
        assert got["bytes_sent"] == want["bytes_sent"]
        assert got["final_loss"] == pytest.approx(want["final_loss"], abs=0)

"""Names of sites that are none, and commands that a coordinator advises, as they are typed at a site."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_toys import X0, quick
from small_runs import flags, settings

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.wan import ops, run
from gossamer.app.wan.apart import Missing
from gossamer.app.wan.presence import Where
from gossamer.app.wan.spec import spec_of
from gossamer.app.wan.waiting import Entrance, advice
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.roster.calls import plain
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.ended import OVER, to_forget
from gossamer.wan.roster.records import Card, Plan
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.roster.sessions import Sessions

pytestmark = pytest.mark.usefixtures("cache")

EXPECTED = "expected 1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or a digit"


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not refused before there is anything to do ends so."""

    def went(*_: Any, **__: Any) -> None:
        raise RunFailed("it went on")

    monkeypatch.setattr(run, "resolve", went)
    monkeypatch.setattr(run, "set_up_logs", went)
    monkeypatch.setattr(ops, "_channel", went)


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("site", ["A_1", "Lyon", "-a", "a-", "a.b", "x" * 64, "", "a b"])
@pytest.mark.parametrize("command", ["join", "check"])
def test_what_is_no_id_of_a_site_is_none_without_certificates_either(capsys: pytest.CaptureFixture[str], command: str, site: str) -> None:
    asked = ["wan", command, "--coordinator", "127.0.0.1:1"]
    assert main([*asked, "--site", site]) == 2
    assert f"--site {site!r}: {EXPECTED}" in capsys.readouterr().err
    assert main([*asked, "--site", "a-1"]) == 1 and "it went on" in capsys.readouterr().err


@pytest.mark.usefixtures("goes_on")
def test_nor_is_it_in_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["wan", "join", "--coordinator", "127.0.0.1:1", "--site", "a-1", "--set", "fleet.name=uniform-2"]
    assert main([*asked, "--set", 'wan.sites=["a-1", "B_2"]']) == 2
    assert f"wan.sites names site 'B_2': {EXPECTED}" in capsys.readouterr().err
    assert main([*asked, "--set", 'wan.sites=["a-1", "b-2"]']) == 1 and "it went on" in capsys.readouterr().err


def test_what_a_site_that_is_refused_is_told_to_type_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is over, and the next one has its id."""
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", threads=16) as server:
        where = Where("lyon", f"127.0.0.1:{server.port}")
        first = CoordinatorClient(plain(where.coordinator), quick(seats=1, min_sites=1), "lyon", Card(address=None))
        first.join(10.0)
        assert Sessions(first, alive=tuple, gone=tuple, ask=lambda seat, data: data).open(X0, timeout_s=10.0).number == 1
        first.publish(Plan(version=1, since=4, body=OVER + "lyon"), 10.0)
        first.leave()
        before = server.status()
        for of in (quick(seats=1, min_sites=1), quick(seats=1, min_sites=1, configuration="f00")):
            late: Any = CoordinatorClient(plain(where.coordinator), of, "lyon", Card(address=None))
            missing = Missing(lambda text: None, str)
            with pytest.raises(BadInput) as refused:
                Entrance(late, Sessions(late, alive=tuple, gone=tuple, ask=late), where, lambda text: None, missing, lambda: None).join()
            late.close()
            assert server.status() == before and "forget the old one: gossamer" in str(refused.value)
        typed = str(refused.value).partition(": gossamer ")[2].split()
        assert main(typed) == 0, typed
        assert "run demo is forgotten" in capsys.readouterr().out and not server.status().runs


def test_a_command_has_the_options_of_who_shows_it() -> None:
    where = Where("lyon", "198.51.100.9:7400", identity=Path("keys/lyon"), secret=Path("run.secret"))
    wanted = "gossamer wan forget one --site SITE --coordinator 198.51.100.9:7400 --identity keys/lyon --secret run.secret, or"
    assert advice(f"{to_forget('one', 'SITE')}, or", where) == wanted
    assert advice("nothing to type", where) == "nothing to type"


def test_a_site_that_differs_ends_with_a_line_that_says_in_what_and_what_to_do(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "set_up_logs", lambda *_, **__: SimpleNamespace())  # those of the other tests stay as they are
    sets = settings(text, method__name='"diloco"', fleet__name='"uniform-2"', wan__run='"one"', wan__deadline_s=12.0)
    job = resolve(load([], sets))
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", threads=16) as server:
        at = f"127.0.0.1:{server.port}"
        first = CoordinatorClient(plain(at), spec_of(job, job.corpus()), "lyon", Card(address="127.0.0.1:5"))
        first.join(10.0)
        asked = ["wan", "join", "--site", "oslo", "--coordinator", at, "--out", str(tmp_path / "oslo"), *flags(sets)]
        assert main([*asked, "--set", "plan.steps=9", "--set", "seed=4"]) == 2
        first.close()
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("gossamer: site oslo differs from run one (there: lyon): plan.steps = 9 (the run: 2), seed = 4 (the run: 0). ")
    assert "Start it again as the run is" in last and last.endswith("for another run give it its own id: --set wan.run=NAME")
    assert not (tmp_path / "oslo").exists()

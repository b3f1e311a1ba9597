"""Names of sites that are none."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.app.wan import ops, run
from gossamer.cli import main
from gossamer.core.errors import RunFailed

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

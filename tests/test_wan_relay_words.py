"""What a site says of its relay: that it is away, or back, or none."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from test_wan_relay import serve, until
from trust_toys import TERMS, Listed, identity, sites

from gossamer.core.errors import RunFailed
from gossamer.wan.relay.client import RelayClient
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.doors import Anybody
from gossamer.wan.trust.guard import Guard
from gossamer.wan.trust.terms import Party


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


def test_that_a_relay_is_away_and_back_is_said(made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("gossamer"), "propagate", True)
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    client = RelayClient(Dial(Party(TERMS, Listed("a", "b", "c")), "b", at, "a", identity(made, "b")), local=None)
    client.wait(60)
    relay.close()
    until(lambda: not client.stands)
    relay = serve(identity(made, "a"), at)
    client.wait(60)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.endswith("relay_client")]
    assert len(said) == 2 and "away" in said[0] and re.search(r"back, after \d+\.\d s", said[1])
    client.close()
    relay.close()


@pytest.mark.parametrize("runs", [(TERMS.run,), ()], ids=["a coordinator", "a site of another run"])
def test_what_is_no_relay_is_told_at_once(made: Path, tmp_path: Path, runs: tuple[str, ...]) -> None:
    guard = Guard("a", dict.fromkeys(runs, Party(TERMS, Anybody())).get, identity(made, "a"))
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, threads=8) as server:
        at = f"127.0.0.1:{server.port}"
        client = RelayClient(Dial(Party(TERMS, Listed("a", "b")), "b", at, "a", identity(made, "b")), local=None)
        with pytest.raises(RunFailed, match=f"{at} is no relay"):
            client.wait(60)
        client.close()

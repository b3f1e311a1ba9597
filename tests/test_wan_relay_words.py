"""What a site says of its relay: that it is away, or back, or none."""

from __future__ import annotations

import logging
import re
import socket
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


def test_that_a_relay_is_away_and_back_is_said(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossamer.wan.relay.client")
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    client = RelayClient(Dial(Party(TERMS, Listed("a", "b", "c")), "b", at, "a", identity(made, "b")), local=None)
    client.wait(60)
    relay.close()
    until(lambda: not client.stands)
    relay = serve(identity(made, "a"), at)
    client.wait(60)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno >= logging.INFO and r.name.endswith("relay.client")]
    assert [level for level, text in said if " away " in text] == ["WARNING"]
    assert [level for level, text in said if re.search(r"back, after \d+\.\d s", text)] == ["INFO"]
    client.close()
    relay.close()


def test_who_does_not_stand_yet_is_no_warning_and_who_never_does_is_one(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    relay = serve(identity(made, "a"))
    dial = Dial(Party(TERMS, Listed("a", "b", "c")), "b", f"127.0.0.1:{relay.port}", "a", identity(made, "b"))
    there = {"c"}
    client = RelayClient(dial, local=None, patience_s=0.3, there=there.__contains__)
    client.wait(60)
    assert client.absent_s("c") is None and client.whose(client.address_of("c")) == "c"

    def knocks() -> list[str]:
        with socket.create_connection(host_and_port(client.address_of("c"))) as one:
            one.sendall(b"x")
            assert one.recv(1) == b""
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    assert knocks() == [] and client.absent_s("c") is not None
    until(lambda: (client.absent_s("c") or 0.0) > 0.4)
    there.clear()
    assert knocks() == [], "it is out of the run"
    there.add("c")
    for _ in range(2):
        (text,) = knocks()
    assert re.search(r"no pipe to or from site c for \d s: site c does not stand at this relay .*: is it started, with this relay\?$", text)
    client.close()
    relay.close()


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("runs", [(TERMS.run,), ()], ids=["a coordinator", "a site of another run"])
def test_what_is_no_relay_is_told_at_once(made: Path, tmp_path: Path, runs: tuple[str, ...]) -> None:
    guard = Guard("a", dict.fromkeys(runs, Party(TERMS, Anybody())).get, identity(made, "a"))
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, threads=8) as server:
        at = f"127.0.0.1:{server.port}"
        client = RelayClient(Dial(Party(TERMS, Listed("a", "b")), "b", at, "a", identity(made, "b")), local=None)
        with pytest.raises(RunFailed, match=f"{at} is no relay"):
            client.wait(60)
        client.close()

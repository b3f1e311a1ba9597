"""What stands for a place of the network, in every option that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.app.wan import ops
from gossamer.cli import main
from gossamer.core.errors import BadInput
from gossamer.wan.check import Check
from gossamer.wan.dialback import Looked
from gossamer.wan.roster.calls import plain
from gossamer.wan.trust.terms import check_address, check_bind, new_secret

NO_PLACE = (
    "", "a", ":", "a:", "::1:7469", "a:b:1", "127.0.0.1:\u0663\u0664", "127.0.0.1:+1", "127.0.0.1: 1", "127.0.0.1:70000",
    "127.0.0.1:000001", "http://a:1", "%s:7469", "a..b:1", ".a:1", "-a:1", "999.1.1.1:1", "1.2.3:1",
    "[a]:1", "[127.0.0.1]:1", "[::1:1", "[]:1", "a b:1",
    "\u043e:1",
)  # fmt: skip


@pytest.mark.parametrize("address", NO_PLACE)
def test_what_is_no_place(address: str) -> None:
    with pytest.raises(BadInput, match=r"--x .*expected HOST:PORT"):
        check_address("--x", address)
    with pytest.raises(BadInput, match=r"--x .*cannot be bound: expected HOST:PORT"):
        check_bind(address, "--x")


def test_what_is_one() -> None:
    for address, host, port in (
        ("127.0.0.1:1", "127.0.0.1", 1), ("[::1]:65535", "::1", 65535), ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
        ("localhost:80", "localhost", 80), ("oslo-1.example.org.:7001", "oslo-1.example.org.", 7001),
        ("my_host:7001", "my_host", 7001), ("1and1.com:7", "1and1.com", 7),
    ):  # fmt: skip
        assert check_address("--x", address) == (host, port)
        check_bind(address)
    for address in (":7001", "0.0.0.0:0", "[::]:0"):
        check_bind(address)
        with pytest.raises(BadInput, match="from 1 to 65535"):
            check_address("--x", address)


@pytest.mark.parametrize("address", ["127.0.0.1:abc", "127.0.0.1:70000", "::1:7469"])
@pytest.mark.parametrize("command", [["status"], ["forget", "one"], ["check"]])
def test_no_command_asks_a_coordinator_that_is_no_place(capsys: pytest.CaptureFixture[str], command: list[str], address: str) -> None:
    assert main(["wan", *command, "--coordinator", address]) == 2
    assert f"--coordinator {address!r}: expected HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--bind", "--relay", "--metrics"])
def test_a_coordinator_listens_at_places_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    state = tmp_path / "runs.db"
    assert main(["wan", "coordinator", "--state", str(state), option, "::1:7469"]) == 2
    assert f"{option} ::1:7469: cannot be bound: expected HOST:PORT" in capsys.readouterr().err and not state.exists()


@pytest.mark.parametrize("metrics", ["nonsense", "192.0.2.1:9464"])
def test_a_relay_with_a_page_that_cannot_be_opens_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: str) -> None:
    def opened(*args: Any) -> None:
        raise AssertionError("the port is open")

    monkeypatch.setattr(ops, "RelayServer", opened)
    new_secret(tmp_path / "secret")
    with pytest.raises(BadInput, match=f"--metrics {metrics}: cannot be bound"):
        ops.relay("127.0.0.1:0", identity=None, secret=tmp_path / "secret", most_mbps=None, metrics=metrics, log_format="text")


def test_a_check_says_so_too() -> None:
    """Of what a site without certificates advertises; join refuses it."""
    one = Check(plain("x"), "b", "127.0.0.1:7400", "127.0.0.1:1", "10.0.0.1:1", None)
    found = one._advertised(Looked(source="127.0.0.1", site=None))
    assert found is not None and found.level == "wrong" and "no certificate" in found.text

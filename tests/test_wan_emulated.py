"""Sites over emulated lines, each in a network namespace. Skipped where there is no root or no emulator, whose command
WAN_EMULATOR gives (bench/wan_field.py says what it has to know)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import wan_cut, wan_saturated  # noqa: E402
from bench.wan_field import Wan, field, lines, sets_of  # noqa: E402
from bench.wan_link import why_not  # noqa: E402

EMULATOR = os.environ.get("WAN_EMULATOR", "")
emulated = pytest.mark.skipif(bool(why := why_not(EMULATOR or None)), reason=why or "")
QUICK: dict[str, Any] = {"eval__every": 0}


@pytest.fixture(autouse=True)
def tree_that_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_lines_of_a_fleet_keep_their_times_and_divide_their_rates() -> None:
    wan = Wan.of("azure-4", 100.0, queue_ms=300.0)
    gen = "node 0 a 10.77.0.1/24 100\nnode 4 e 10.77.0.5/24 100\nlink 0 3 100 20 0 0 200\nlink 0 4 100 20 0 0 200\n"
    assert wan.text(gen).splitlines() == [
        "node 0 a 10.77.0.1/24 9.4000",
        "node 4 e 10.77.0.5/24 100",
        "link 0 3 8.0000 37.000 0 0.0 300.0",
        "link 0 4 100 20 0 0 200",
    ]


@emulated
@pytest.mark.timeout(120)
def test_a_cut_line_carries_nothing_until_it_is_whole_again() -> None:
    with lines(EMULATOR, Wan.equal(2, 100.0, 5.0)):
        from bench.wan_field import Field, address, device

        run: Any = Field.__new__(Field)
        run.emulator, run.n = EMULATOR, 2
        listen = "import socket; s = socket.create_server(('0.0.0.0', 7001)); print('here', flush=True); exec('while 1: s.accept()')"
        server = subprocess.Popen([EMULATOR, "exec", "1", sys.executable, "-c", listen], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()

            def reaches() -> bool:
                code = f"import socket; socket.create_connection(({address(1)!r}, 7001), 2)"
                return subprocess.run([EMULATOR, "exec", "0", sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0

            assert device(EMULATOR, 0)
            assert reaches()
            run.cut(1, whole=False)
            assert not reaches()
            run.cut(1, whole=True)
            assert reaches()
        finally:
            server.kill()
            server.communicate()


@emulated
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["gossip", "diloco"])
def test_who_was_cut_off_comes_back(name: str) -> None:
    found = wan_cut.measure(EMULATOR, sets_of(**wan_cut.BASE, **wan_cut.METHODS[name]), "cut", 12.0, 4)
    assert found["counts"]["sessions"] >= 2
    assert found["counts"]["healed"] >= 1
    assert found["solo"] <= 4  # until it knows
    assert found["rounds_of_the_others"] >= 1
    assert found["rise"] < 0.3


@emulated
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line, seconds", [("equal", 15.0), ("home", 50.0)])
def test_payload_that_fills_a_line_leaves_the_membership_alone(line: str, seconds: float) -> None:
    found = wan_saturated.measure(
        EMULATOR, wan_saturated.LINES[line], sets_of(**wan_saturated.BASE, **wan_saturated.METHODS["gossip"]), seconds
    )
    assert found["asked"] > 5
    assert (found["sessions"], found["late"]) == (1, 0)
    assert found["all_in"] and not found["counts_changed"]


@emulated
@pytest.mark.timeout(300)
def test_sites_end_with_the_summary_of_all() -> None:
    more: dict[str, object] = {"method__name": "geomesh", "plan__name": "uniform", "run__rounds": 3, "clock__pace_s": 0.0}
    with field(EMULATOR, Wan.equal(2, 50.0, 20.0), sets_of(**{**wan_cut.BASE, **more, "fleet__name": "uniform-2"})) as run:
        run.join("lyon", "oslo")
        run.end("lyon", "oslo")
        assert run.summary("lyon") == run.summary("oslo")

"""Sites that can only dial out train through the relay beside the coordinator, with real processes."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from ports import free
from test_wan_run import check_same, sets_of, simulated
from wan_run_toys import field

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.timeout(300)
def test_sites_that_only_dial_out_train_with_the_bits_of_the_simulation(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 3, "diloco", run__rounds=15)
    relay, page, mine = (f"127.0.0.1:{free()}" for _ in range(3))
    with field(tmp_path / "wan", sets, beside=("--relay", relay, "--metrics", page, "--log-format", "json")) as run:
        run.join("lyon", options=("--relay", relay, "--metrics", mine))
        run.join("oslo", options=("--relay", relay))
        run.join("porto", options=("--relay", relay, "--bind", "127.0.0.1:0"))
        run.says("lyon", "session 1")
        run.trains("lyon", 1)
        told = urllib.request.urlopen(f"http://{page}/metrics", timeout=10).read().decode()
        assert re.search(r'gossamer_relay_pipes\{run="[^"]+",site="oslo"\} [1-9]', told)
        assert re.search(r'gossamer_run_sites\{run="[^"]+",standing="in"\} 3', told)
        told = urllib.request.urlopen(f"http://{mine}/metrics", timeout=10).read().decode()
        assert re.search(r'gossamer_peer_payload_sent_bytes_total\{peer="oslo",run="[^"]+",site="lyon"\} [1-9]', told)
        run.ends("lyon", "oslo", "porto")
        check_same(run.summary("lyon"), simulated(sets, tmp_path / "sim"))


@pytest.mark.timeout(300)
def test_who_dies_and_cannot_be_dialled_is_given_up_when_others_know(text: Path, tmp_path: Path) -> None:
    relay = f"127.0.0.1:{free()}"
    with field(tmp_path / "wan", sets_of(text, 3, "diloco", run__rounds=5000), beside=("--relay", relay)) as run:
        run.join("lyon", options=("--relay", relay, "--bind", "127.0.0.1:0"))
        run.join("oslo", "porto", options=("--relay", relay))
        run.trains("lyon", 3)
        assert "WARNING" not in run.log("lyon") + run.log("oslo"), run.log("lyon") + run.log("oslo")
        run.kill("porto")
        for site in ("lyon", "oslo"):
            run.says(
                site,
                r"site porto is gone \(round \d+: (its process is gone: (the coordinator|it does not stand at the relay)|site \w+ lost it)",
            )
            run.trains(site, 2)

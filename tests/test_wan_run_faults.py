"""Faults of a synchronous wide-area run with real processes: one after the other in one run, which goes on, and loses nothing."""

from __future__ import annotations

import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from test_wan_run import sets_of
from test_wan_run_sessions import check_own, last
from wan_run_toys import Field, field

from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")


def sessions(run: Field, site: str) -> list[tuple[int, str]]:
    """(round, members) of the sessions that a site has been in."""
    return [(int(round), names) for round, names in re.findall(r"^session \d+, from round (\d+): (.+)$", run.log(site), re.MULTILINE)]


def meets(run: Field, site: str, *others: str, timeout_s: float = 90.0) -> int:
    """Waits until a site is in a session with these alone. The round that it begins with."""
    want, until_s = ", ".join(sorted([site, *others])), time.monotonic() + timeout_s
    while not (found := sessions(run, site)) or found[-1][1] != want:
        assert time.monotonic() < until_s and run.processes[site].poll() is None, f"{site} is not with {others}:\n{run.log(site)}"
        time.sleep(0.05)
    return found[-1][0]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
@pytest.mark.timeout(400)
def test_one_fault_after_the_other(text: Path, tmp_path: Path) -> None:
    more = {"run__rounds": 5000, "clock__pace_s": 0.1, "eval__every": 50, "checkpoint__every": 4, "checkpoint__keep": 3}
    with field(tmp_path / "wan", sets_of(text, 3, "diloco", **more), tls=False) as run:
        run.join("lyon", "oslo", "porto")
        meets(run, "porto", "lyon", "oslo")

        # The disk of a site is full: files may not be larger than what its records take.
        porto = run.processes["porto"].pid
        before = resource.prlimit(porto, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        run.says("porto", r"no checkpoint of round \d+, the run goes on: .* cannot be written .*free some space")
        run.trains("porto", 2)
        resource.prlimit(porto, resource.RLIMIT_FSIZE, before)
        written = checkpoint.latest(run.root / "runs" / "porto" / "checkpoints")
        run.trains("porto", 5)
        assert (checkpoint.latest(run.root / "runs" / "porto" / "checkpoints") or 0) > (written or 0)
        assert sessions(run, "lyon") == [(0, "lyon, oslo, porto")], "none of the others has noticed"

        # A site stands still, and comes back.
        run.kill("porto", signal.SIGSTOP)
        run.says("lyon", r"site porto is gone")
        meets(run, "lyon", "oslo")
        run.says("lyon", r"goes on with round \d+ after the \d+ inner steps of it")  # it had waited for porto, with all of them done
        run.trains("lyon", 2)
        run.kill("porto", signal.SIGCONT)
        run.says("porto", "took the state after round")
        meets(run, "lyon", "oslo", "porto")

        # A site dies while the coordinator is away: the others agree without it.
        run.kill("coordinator")
        run.ends("coordinator", code=-signal.SIGKILL)
        run.trains("lyon", 2)
        run.kill("oslo")
        meets(run, "lyon", "porto")
        run.trains("porto", 2)
        run.coordinator()
        run.join("oslo")
        meets(run, "oslo", "lyon", "porto")
        run.trains("oslo", 5)

        # All die at once, and come back.
        for site in ("lyon", "oslo", "porto"):
            run.kill(site)
        run.ends("lyon", "oslo", "porto", code=-signal.SIGKILL)
        kept = max(last(run, site, seat)[0] for seat, site in enumerate(("lyon", "oslo", "porto")))
        (run.root / "lyon.log").unlink()
        run.join("lyon", "oslo", "porto")
        assert meets(run, "lyon", "oslo", "porto") >= kept, "nothing that a disk held is lost"
        run.trains("porto", 2)
        run.stops("lyon", "oslo", "porto")
        check_own(run, "lyon")  # the others were away, and have no rounds of that time
        assert len({last(run, site, seat) for seat, site in enumerate(("lyon", "oslo", "porto"))}) == 1


@pytest.mark.timeout(300)
def test_a_slow_site_is_left_behind_and_its_work_is_kept(text: Path, tmp_path: Path) -> None:
    more = {
        "run__rounds": 5000, "clock__pace_s": 0.1, "eval__every": 0, "wan__deadline_s": 6.0, "wan__lease_s": 3.0,
        "wan__quorum": '"deadline"', "wan__late": '"keep"',
        "clock__slow_worker": 2, "clock__slow_factor": 35.0, "clock__slow_at": 3 / 5000,
    }  # fmt: skip
    with field(tmp_path / "wan", sets_of(text, 3, "diloco", **more), tls=False) as run:
        run.join("lyon", "oslo", "porto")
        round = run.says("lyon", r"site porto is gone \(round (\d+): (?:past the deadline of [\d.]+ s|site oslo lost it)\)")
        run.says("lyon", rf"session 2, from round {round}: lyon, oslo\n")
        run.says("porto", r"took the state after round \d+ from site (?:lyon|oslo), and keeps its own work since round \d+")
        meets(run, "lyon", "oslo", "porto")
        check_own(run, "lyon", "oslo")

"""Sites of several ranks in wide-area runs, with real processes: the bits of other real runs, sites that die, return and come late."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ports import free
from small_runs import command, flags
from test_site_runs import environment, fleet
from test_wan_run import check_same, sets_of
from test_wan_run_faults import meets
from wan_run_toys import SITES, Field, field

from gossamer.app.wan.presence import Where
from gossamer.app.wan.run import join
from gossamer.core.errors import BadInput
from gossamer.core.tree import sha256
from gossamer.train import checkpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("cache")]
RANKS = (1, 2, 3)


def ranked(text: Path, folder: Path, ranks: Sequence[int], method: str, **more: object) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = fleet(folder / "fleet.toml", ranks)
    base: dict[str, object] = {"fleet__name": f'"{file}"', "plan__name": '"uniform"', "plan__batch": 5}
    return sets_of(text, len(ranks), method, **(base | more))


def trained(sets: list[str], n: int, out: Path) -> dict[str, Any]:
    """What `gossamer train` makes of the same."""
    code, said = command("train", *flags(sets), "--workers", str(n), "--out", str(out))
    assert code == 0, said
    return json.loads((out / "summary.json").read_text())


def last(run: Field, site: str, seat: int) -> tuple[int, str]:
    """Round and parameters of a site's own newest checkpoint, whole."""
    folder = run.root / "runs" / site / "checkpoints"
    found = checkpoint.latest(folder)
    assert found is not None
    return found, sha256(checkpoint.read_part(folder, found, seat).state.x)


def ranks_of(run: Field, site: str) -> list[int]:
    """Processes that a site has started."""
    parent = run.processes[site].pid
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def ends(*processes: int, within_s: float = 15.0) -> None:
    until_s = time.monotonic() + within_s
    while any(
        Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        for pid in processes
    ):
        assert time.monotonic() < until_s, f"of {processes} some still run"
        time.sleep(0.05)


@pytest.mark.parametrize("method", ["geomesh", "gasloc"])
def test_sites_of_1_2_and_3_ranks_have_the_bits_of_every_other_real_run(method: str, text: Path, tmp_path: Path) -> None:
    more: dict[str, object] = {"inner__lr": 1e-3} if method == "geomesh" else {}
    more |= {"method__topology": '"two_peer"'} if method == "gasloc" else {}
    sets = ranked(text, tmp_path, RANKS, method, **more)
    with field(tmp_path / "wan", sets, tls=method == "geomesh") as run:
        if method == "geomesh":
            started = [name for site, ranks in zip(SITES, RANKS, strict=False) for name in run.ranks_join(site, ranks)]
            run.ends(*started)
        else:
            run.join(*SITES[:3])
            run.ends(*SITES[:3])
        got, want = run.summary("lyon"), trained(sets, 3, tmp_path / "net")
        check_same(got, want)
        assert got["bytes_received"] == want["bytes_received"]
        assert run.summary("porto") == got
        if method != "gasloc":
            assert len(set(got["params_sha256"])) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_sites_of_several_ranks_come_late_die_leave_and_return(text: Path, tmp_path: Path) -> None:
    more = {"run__rounds": 5000, "clock__pace_s": 0.1, "eval__every": 50, "checkpoint__every": 4, "wan__founders": 2, "plan__batch": 8}
    with field(tmp_path / "wan", ranked(text, tmp_path, (1, 2, 2), "diloco", **more), tls=False) as run:
        run.join("lyon", "oslo")
        assert meets(run, "oslo", "lyon") == 0

        # A site of two ranks comes, and takes the state of a site of one.
        run.join("porto")
        run.says("porto", r"took the state after round \d+ from site lyon")
        meets(run, "lyon", "oslo", "porto")
        run.trains("porto", 2)

        # One of two ranks is killed: the site ends with it, the others go on.
        (rank,) = ranks_of(run, "oslo")
        os.kill(rank, signal.SIGKILL)
        run.ends("oslo", code=1)
        assert "rank 1 of this site was killed (SIGKILL), and the site ends with it." in run.log("oslo")
        meets(run, "lyon", "porto")
        run.trains("porto", 2)
        run.join("oslo")
        run.says("oslo", r"took the state after round \d+ from site porto")
        meets(run, "lyon", "oslo", "porto")

        # The first rank is killed: the other one ends, too.
        others = ranks_of(run, "porto")
        run.kill("porto")
        run.ends("porto", code=-signal.SIGKILL)
        ends(*others)
        meets(run, "lyon", "oslo")
        run.trains("oslo", 2)

        # A site of one rank is killed, and takes the state of one of two.
        run.join("porto")
        meets(run, "lyon", "oslo", "porto")
        run.kill("lyon")
        run.ends("lyon", code=-signal.SIGKILL)
        meets(run, "oslo", "porto")
        run.trains("porto", 2)
        run.join("lyon")
        run.says("lyon", r"took the state after round \d+ from site oslo")
        meets(run, "lyon", "oslo", "porto")

        # A clean leave is one of all ranks, whoever is asked.
        others = ranks_of(run, "oslo")
        os.kill(others[0], signal.SIGINT)
        run.ends("oslo", code=128 + signal.SIGINT)
        ends(*others)
        assert "site oslo has left run" in run.log("oslo")
        meets(run, "lyon", "porto")
        run.join("oslo")
        meets(run, "lyon", "oslo", "porto")
        run.trains("oslo", 2)
        run.stops("lyon", "oslo", "porto")
        for site in ("lyon", "oslo", "porto"):  # each was away for a while
            mine = [(r["round"], r["loss"]) for r in run.own(site) if r["kind"] == "round"]
            assert all(a < b and after < before + 0.7 for (a, before), (b, after) in itertools.pairwise(mine)), (site, mine)
        assert len({last(run, site, seat) for seat, site in enumerate(("lyon", "oslo", "porto"))}) == 1


def test_gossip_goes_on_when_a_rank_dies_and_torchrun_starts_a_site_as_well(text: Path, tmp_path: Path) -> None:
    more = {"run__rounds": 5000, "clock__pace_s": 0.1, "clock__kill": "[[1, 3]]", "method__topology": '"one_peer"', "eval__every": 50}
    with field(tmp_path / "wan", ranked(text, tmp_path, (2, 2, 1, 1), "gasloc", plan__batch=2, **more), tls=False) as run:
        run.join("oslo", "porto", "riga")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free()), "-m", "gossamer"]
        command += ["wan", "join", "--site", "lyon", "--coordinator", f"127.0.0.1:{run.port}", "--out", str(run.root / "runs" / "lyon")]
        with (run.root / "lyon.log").open("w") as log:
            env = {**os.environ, **environment(), "OMP_NUM_THREADS": "1"}
            lyon = subprocess.Popen([*command, *flags(run.sets)], stdout=log, stderr=log, env=env)
        try:
            run.ends("oslo", code=1, timeout_s=200)
            assert "rank 1 of this site was killed (SIGKILL), and the site ends with it." in run.log("oslo")
            run.trains("porto", 4)
            run.trains("riga", 4)
            assert "session 2" not in run.log("porto") and "session 2" not in run.log("lyon"), "nobody stops for a death"
            lyon.terminate()
            lyon.wait(60)
        finally:
            lyon.kill()
            lyon.wait(60)
        assert "site lyon has left run" in run.log("lyon")
        meets(run, "porto", "riga")
        run.stops("porto", "riga")
        found = [last(run, site, seat) for seat, site in ((0, "lyon"), (2, "porto"), (3, "riga"))]
        assert found[1][0] == found[2][0] > found[0][0] > 4


def test_what_cannot_be_is_refused_in_words(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("oslo", "127.0.0.1:1")
    for ranks, sets, given, env, words in (
        ((1, 2), ["wan.sites=[]"], where, {}, "does not know which it is: name all sites in wan.sites"),
        ((1, 2), [], replace(where, relay="127.0.0.1:2"), {}, "a relay knows one process of a site, and site oslo has 2 ranks"),
        ((1, 2), [], where, {"RANK": "0", "WORLD_SIZE": "3"}, "3 processes were started for site oslo .* 2 ranks"),
        ((1, 2), ["method.name=halos", "checkpoint.every=0"], where, {}, "halos"),
        ((1, 2), ["inner.name=muon", "inner.lr=1e-3"], where, {}, "muon needs whole matrices"),
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            with pytest.raises(BadInput, match=words):
                join([], [*ranked(text, tmp_path, ranks, "diloco"), *sets], given, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

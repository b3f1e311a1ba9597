"""How long training stands still when a site dies: kill -9 in the middle of a round, in a synchronous method and in gossip.

A coordinator and three sites on this machine, each a process of `gossamer wan`, with a paced model, so that a round takes a known time. One
site is killed at several places of a round, and comes back. The *gap* is the time between two completed rounds of a site that lives, across
the death, less the time of a round: what the death has cost. In gossip, where nobody goes back, it is the longest such time of the rounds
around the death.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median as middle
from typing import Any

from bench.common import command, machine, median, spread, write

SITES = ("lyon", "oslo", "porto")
STEPS, STEP_S = 20, 0.2
METHODS = {"synchronous": ["method.name=diloco"], "gossip": ["method.name=gasloc", "method.topology=one_peer"]}
AIMS = {"synchronous": "under one round", "gossip": "under 1 s"}


def settings(method: str) -> list[str]:
    """A model of thirty thousand parameters: its bytes are no part of the gap."""
    return [
        *METHODS[method], "fleet.name=uniform-3", f"wan.sites={json.dumps(SITES)}", "wan.min_sites=2", "wan.deadline_s=12",
        "data.vocab_size=512", "data.tokenizer=bytes",
        "model.config={model_type='llama', hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2}",
        f"plan.steps={STEPS}", "plan.batch=2", "plan.sequence=16", "eval.sequences=4", "eval.batch=4", "eval.every=0",
        "run.rounds=5000", "run.device=cpu", f"clock.pace_s={STEP_S}",
    ]  # fmt: skip


class Run:
    """Processes of one run."""

    def __init__(self, root: Path, method: str) -> None:
        self.root, self.method = root, method
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._start("coordinator", "coordinator", "--state", str(root / "runs.db"), "--bind", self.address)

    def _start(self, name: str, *arguments: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "gossamer", "wan", *arguments], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def join(self, site: str) -> None:
        sets = [a for s in settings(self.method) for a in ("--set", s)]
        self._start(site, "join", "--site", site, "--coordinator", self.address, "--out", str(self.root / site), *sets)

    def times(self, site: str) -> list[float]:
        """The clock of the run when a site completed each of its rounds."""
        files = list((self.root / site / "workers").glob("*/metrics.jsonl"))
        lines = files[0].read_text().rpartition("\n")[0].splitlines() if files else []
        return [r["time_s"] for r in map(json.loads, lines) if r["kind"] == "round"]

    def wait(self, site: str, rounds: int, timeout_s: float = 180.0) -> None:
        """Until the site has completed so many rounds more."""
        first, until_s = len(self.times(site)), time.monotonic() + timeout_s
        while len(self.times(site)) < first + rounds:
            if time.monotonic() > until_s or self.processes[site].poll() is not None:
                raise RuntimeError(f"site {site} does not go on:\n{(self.root / f'{site}.log').read_text()}")
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def gaps(method: str, places: list[float]) -> list[dict[str, float]]:
    """One death for each place, a share of a round."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), method)
        try:
            for site in SITES:
                run.join(site)
            run.wait("lyon", 3)
            for place in places:
                run.wait("lyon", 1)
                before = len(run.times("lyon"))
                round_s = middle(b - a for a, b in zip(run.times("lyon")[-4:], run.times("lyon")[-3:], strict=False))
                time.sleep(place * round_s)
                run.processes["porto"].send_signal(signal.SIGKILL)
                run.wait("lyon", 4)
                times = run.times("lyon")[before - 1 : before + 3]
                gap_s = max(b - a for a, b in itertools.pairwise(times)) - round_s
                found.append({"place": place, "round_s": round_s, "gap_s": gap_s})
                print(method, json.dumps(found[-1]), flush=True)
                if place != places[-1]:
                    run.join("porto")
                    run.wait("porto", 3)
        finally:
            run.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=float, nargs="+", default=[0.3, 0.7], help="shares of a round")
    args = parser.parse_args()
    before, found = machine(), {}
    for method in METHODS:
        rows = gaps(method, args.places)
        found[method] = {
            "aim": AIMS[method],
            "gap_rounds": median(r["gap_s"] / r["round_s"] for r in rows),
            "gap_s": median(r["gap_s"] for r in rows),
            "round_s": median(r["round_s"] for r in rows),
            "places": args.places,
            "gaps_s": spread(r["gap_s"] for r in rows),
        }
    print(json.dumps(found))
    result: dict[str, Any] = {"command": command("bench.wan_faults"), "machine": before, **found}
    write("wan_faults", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One process of a real run in tests: trains several methods one after the other, and writes what each ended with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.core.tree import master, sha256
from gossamer.net import init
from gossamer.real import run
from gossamer.train.model import parameters_of
from gossamer.worker.effects import Go
from gossamer.worker.peer import peer


class Rounds:
    """Hooks that keep the records of rounds."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def boundary(self, *_: object) -> Go:
        return Go()

    def note(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            self.records.append(record)

    def span(self, *_: object) -> None: ...


def main(out: Path, configs: list[Path]) -> None:
    """Runs each configuration and writes worker-<i>.json."""
    torch.set_num_threads(1)
    results = {}
    with init() as group:
        for config in configs:
            job = resolve(load([config]))
            group.all_equal({"configuration": job.run_id})
            body = job.body(group.me, job.corpus(), job.pace_s(group.me))
            state = job.first_state(group.me, master(parameters_of(body.model)))
            hooks = Rounds()
            state, account = run(peer(job.seat(group.me), state), body, hooks, group)
            results[config.stem] = {"sha256": sha256(state.x), "sent": account.bytes_sent, "received": account.bytes_received}
            results[config.stem]["rounds"] = [{k: v for k, v in r.items() if k.endswith("_s")} for r in hooks.records]
        me = group.me
    (out / f"worker-{me}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(a) for a in sys.argv[2:]])

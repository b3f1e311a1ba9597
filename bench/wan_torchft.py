"""DiLoCo of torchft on Gossamer's model, data, pace and optimizers: what `bench.wan_time` compares with. It needs torchft, and runs as a
process of `bench.wan_field`.

Inner steps are those of a Gossamer worker (same batches, clipping and schedule). torchft's DiLoCo hangs on the step of the inner optimizer;
its outer optimizer is SGD with Nesterov momentum, which is Gossamer's too, and its gradients travel in one bucket over gloo. Nobody
heals at the start: all replicas begin with the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.wan_field import address
from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.core.tree import master

LIGHTHOUSE_PORT, STORE_PORT, MANAGER_PORT = 7510, 7511, 7512
PATIENCE = timedelta(seconds=300)


def replica(what: dict[str, Any]) -> int:
    """One process: the lighthouse, or a replica, which prints its curve and utilisation as JSON when it has the target."""
    if (count := what.get("lighthouse")) is not None:
        from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,import-untyped,unused-ignore]

        server = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=count, join_timeout_ms=60_000, quorum_tick_ms=20)
        print("lighthouse: there", server.address(), flush=True)
        while True:
            time.sleep(1.0)
    return _train(what["replica"], what["n"], what["steps"], what["target"], what["sets"])


def _train(me: int, n: int, steps: int, target: float, sets: list[str]) -> int:
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from torchft.manager import Manager  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from torchft.process_group import ProcessGroupGloo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _device_of(address(me))
    job = resolve(load([], sets))
    corpus = job.corpus()
    body, judge = job.body(me, corpus, job.pace_s(me)), job.judge(corpus)
    method, batch = job.config.method.options, job.method.plan.batch[me]
    outer = torch.optim.SGD(body.model.parameters(), lr=method["outer_lr"], momentum=method["outer_momentum"], nesterov=True)
    store = TCPStore("0.0.0.0", STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=n,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address(me),
        store_port=store.port,
        lighthouse_addr=f"http://{address(n)}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica_{me}",
        port=MANAGER_PORT,
        hostname=address(me),
        init_sync=False,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    begin_s = time.monotonic()
    curve: list[list[float]] = []
    busy_s, per_step = 0.0, n * batch * job.method.plan.sequence
    with DiLoCo(manager, [body.model], body._optimizer, outer, sync_every=steps, use_bucketization=True):
        while not curve or curve[-1][1] > target:
            start_s = time.monotonic()
            for h in range(steps):
                body.model.train()
                body._backward(batch)
                body._sleep_until(start_s, h + 1, 0.0)
                if h == steps - 1:
                    busy_s += time.monotonic() - start_s
                body._step((len(curve) * steps + h) * per_step)
            curve.append([time.monotonic() - begin_s, judge(master(body.tree))])
    print(json.dumps({"curve": curve, "utilisation": busy_s / (time.monotonic() - begin_s)}), flush=True)
    os._exit(0)  # the manager's threads would wait for each other


def _device_of(own: str) -> str:
    """The network device with this address."""
    import subprocess

    for line in subprocess.run(["ip", "-o", "-4", "addr"], check=True, capture_output=True, text=True).stdout.splitlines():
        if f" {own}/" in line:
            return line.split()[1]
    raise RuntimeError(f"no device has the address {own}")

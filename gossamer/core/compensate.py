"""How far a slow line is paid for with inner steps in gossip, and the literature's model of the time of a round.

A worker whose line is slow is done earlier if it takes fewer steps, and so what it *says* comes in time. What it *hears* does not: its
peers' parameters enter its slow downlink when those have finished their own steps, and the others got the steps that it was spared. Peers
change from round to round, and workers may be ahead of each other. So neither the whole exchange c_i nor none of it is the right thing to
pay for: a share s of it is, found by working out rounds of graphs of the same law.

    H_i = max(1, round((T - s c_i) / t_i)),    s among 0, 1/16, ..., 1 with the least seconds per token

s = 0 looks at speeds alone, for equally fast workers the uniform plan: a compensated plan is never slower than that by this formula.
Cagnasso, Belilovsky and Oyallon 2026 (GASLoC, sec. 4) give a worker with a slow link fewer steps; the share is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gossamer.core.awb import balance
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.predict import Costs, of_law, predict, rounds_of_law, unhidden_s
from gossamer.core.topology import Complete
from gossamer.core.tree import Layout
from gossamer.core.wires import Net

_PARTS = 16


def changes_peers(method: Method) -> bool:
    """Whether the workers of `method` wait for peers of the round alone: gossip, on any graph but the complete one."""
    return not method.synchronous and not method.tiers and method.n > 1 and not isinstance(method.topology, Complete)


def paid_s(method: Method, net: Net, layout: Layout, costs: Costs, tokens: int) -> list[float]:
    """What each worker's plan leaves time for, in seconds: c_i (`gossamer.core.predict.unhidden_s`), and in gossip the share s of it.

    Args:
        layout: what is exchanged.
        tokens: of a round, of all workers together.
    """
    c = unhidden_s(method, net, layout, costs)
    if not changes_peers(method) or max(c) == min(c):
        return c
    s = share(method, net, layout, costs, tokens, c)
    return [s * v for v in c]


def share(method: Method, net: Net, layout: Layout, costs: Costs, tokens: int, c: Sequence[float]) -> float:
    """s: the share of `c` that takes the least seconds per token to pay for; of equals the smallest. The method's own H_i do not matter.

    The graphs are drawn with a seed of their own, so that runs that differ in their seed alone have the same plan.
    """
    here = replace(method, topology=of_law(method.topology))
    batch, sequence, rounds = method.plan.batch, method.plan.sequence, rounds_of_law(net.n)
    first: dict[Plan, int] = {}
    for k in range(_PARTS + 1):
        first.setdefault(balance(costs.step_s, batch, [k / _PARTS * v for v in c], tokens, sequence), k)

    def per_token_s(plan: Plan) -> float:
        return predict(replace(here, plan=plan), net, layout, costs, rounds).round_s / plan.tokens_per_round

    return first[min(first, key=per_token_s)] / _PARTS


def model_s(method: Method, net: Net, layout: Layout, costs: Costs) -> float:
    """The literature's model of a round, in seconds. It knows no latency and no overlap, and of a line only how long one worker's packet
    takes on it, T_i^comm = bytes max(up_i, down_i).

        all-reduce    max_i 2 T_i^comm + max_i H_i T_i^comp            Cagnasso et al. 2026 (GASLoC)
        gossip        max_i (k_i T_i^comm + H_i T_i^comp)              the same for k_i messages and nobody but oneself to wait for

    The second is what H_i is chosen to make equal. It leaves out that a worker's peers speak when they have finished themselves.
    """
    comm_s = costs.charge * (costs.header_bytes + method.wire.nbytes(layout)) * np.maximum(net.up, net.down)
    comp_s = np.array(costs.step_s) * method.plan.mean_steps
    if not changes_peers(method):
        return float(2 * comm_s.max() + comp_s.max()) if net.n > 1 else float(comp_s.max())
    graph = method.topology.at(0)
    peers = np.array([len(graph.out(i)) for i in range(net.n)])
    return float((peers * comm_s + comp_s).max())

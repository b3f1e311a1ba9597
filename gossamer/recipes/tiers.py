"""Asynchronous methods: a worker waits for nobody but its own region's server."""

from __future__ import annotations

import math
from dataclasses import replace

from gossamer.core.errors import BadInput
from gossamer.core.method import Method
from gossamer.core.outer import OuterSGD
from gossamer.core.tiers import DelayedNesterov, Tiers
from gossamer.core.topology import Complete
from gossamer.recipes.setting import ADAMW, Setting


def halos(
    setting: Setting,
    *,
    block: int = 8,
    local_lr: float = 3.2,
    local_momentum: float = 0.9,
    local_delay: int = 16,
    global_lr: float = 0.3,
    global_momentum: float = 0.5,
    global_delay: int = 2,
    merge: float = 0.25,
    report_every: int = 32,
) -> Method:
    """HALoS (Kim et al. 2025, arXiv 2506.04531): asynchronous and hierarchical. The defaults are the published settings.

    Worker i pulls x from its region's server, takes H_i = max(1, ceil(block * speed_i)) steps, speed relative to the fastest, and pushes
    D = x - y. The local server applies `DelayedNesterov` to each arrival and answers with its x. After `report_every` accepted updates it
    sends u = M - x to the global server, M being its parameters after the last merge, and goes on serving; the global server applies its
    own `DelayedNesterov` to each arrival and answers with x_g; then x <- (1 - merge) x + merge x_g and M <- x.

    A round of the method is one block of every worker. Their number is such that all rounds together take the tokens of the setting's
    plan and rounds, to the nearest whole block. Sends 4 P bytes a worker and block.
    """
    if block < 1:
        raise BadInput(f"block is {block}: the fastest worker takes 1 inner step or more between pull and push (8 is published)")
    fastest = max(setting.speeds, default=1.0)
    relative = [v / fastest for v in setting.speeds] or [1.0] * setting.n
    plan = replace(setting.plan, steps=tuple(max(1, math.ceil(block * v - 1e-9)) for v in relative), exact=())
    blocks_per_round = setting.plan.tokens_per_round / plan.tokens_per_round
    return Method(
        name="halos",
        inner=setting.inner_or(ADAMW),
        schedule=setting.schedule,
        plan=plan,
        topology=Complete(setting.n),
        outer=OuterSGD(lr=1.0, momentum=0.0, nesterov=False),
        rounds=max(1, round(setting.rounds * blocks_per_round)),
        weights="uniform",
        tiers=Tiers(
            regions=setting.regions or (0,) * setting.n,
            local_rule=DelayedNesterov(local_lr, local_momentum, local_delay),
            top_rule=DelayedNesterov(global_lr, global_momentum, global_delay),
            merge=merge,
            report_every=report_every,
            blocks_per_round=blocks_per_round,
        ),
    )

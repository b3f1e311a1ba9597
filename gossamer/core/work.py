"""What an outer step owes to unequal work, within a round and between rounds.

Work is accumulated inner learning rate. All workers follow one schedule, so worker i's is in proportion to its H_i; the mean over the
workers that take part, with the weights w_i of the exchange (tokens, or 1/n), is Hbar = sum_i w_i H_i. Two corrections follow:

- *Within a round* each D^i is scaled by Hbar / H_i before it is said: the mean is over drifts per step, times Hbar. That is the normalised
  averaging of FedNova (Wang et al. 2020, arXiv 2007.07481, section 4, tau_eff = sum_i p_i tau_i), without which the worker with the most
  steps decides where all go.
- *Between rounds* a round of r = Hbar / Hbar of the first plan (of all workers) counts as r rounds of the first plan's work, each with
  drift d = D / r: momentum decays by gamma^r, and what is moved per unit of work stays what it was (`outer_step`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.core.outer import OuterSGD, OuterState
from gossamer.core.plan import Plan
from gossamer.core.tree import Tree


def _mean_steps(plan: Plan, by_tokens: bool) -> tuple[int, int]:
    """Hbar as numerator and denominator."""
    weights = [h * b if by_tokens else 1 for h, b in zip(plan.steps, plan.batch, strict=True)]
    return sum(w * h for w, h in zip(weights, plan.steps, strict=True)), sum(weights)


def drift_scale(plan: Plan, i: int, by_tokens: bool, there: Sequence[int] | None = None) -> float:
    """Hbar / H_i; exactly 1 where all take equally many steps. `there`: who takes part; None: all.

    >>> drift_scale(Plan((30, 10), (1, 1), 4), 1, by_tokens=True)
    2.5
    """
    total, weight = _mean_steps(plan if there is None else plan.among(there), by_tokens)
    return total / (weight * plan.steps[i])


def round_work(plan: Plan, first: Plan, by_tokens: bool, there: Sequence[int] | None = None) -> float:
    """r = Hbar of `plan` / Hbar of `first`; exactly 1 for equal plans. `there`: who takes part in the round; None: all. The unit is that of
    all of them throughout.

    >>> round_work(Plan((45, 15), (1, 1), 4), Plan((30, 30), (1, 1), 4), by_tokens=False)
    1.0
    """
    total, weight = _mean_steps(plan if there is None else plan.among(there), by_tokens)
    total0, weight0 = _mean_steps(first, by_tokens)
    return (total * weight0) / (weight * total0)


def outer_step(rule: OuterSGD, work: float, x: Tree, mixed: Tree, s: OuterState) -> tuple[Tree, OuterState]:
    """The step of `rule` on D = `mixed`, the drift of a round of relative work r = `work`: as r steps with d = D / r each.

    With q = (1 - gamma^r) / (1 - gamma) and the buffer b from before,

        sum of buffers = gamma q b + (r - gamma q) / (1 - gamma) d
        b <- gamma^r b + q d
        x <- x - lr * (D + gamma * sum of buffers) with `nesterov`, else x - lr * (sum of buffers)

    For whole r these are r steps of torch.optim.SGD in one, to rounding. r = 1 is the rule's own step, bit for bit.
    """
    if work == 1.0 or not rule.momentum:
        return rule.step(x, {}, {}, mixed, s)
    gamma = rule.momentum
    kept = gamma**work
    q = (1.0 - kept) / (1.0 - gamma)
    of_buffer, of_drift = gamma * q, (work - gamma * q) / (1.0 - gamma) / work
    if rule.nesterov:
        of_buffer, of_drift = gamma * of_buffer, 1.0 + gamma * of_drift
    for k, d in mixed.items():
        b = s["momentum"][k]
        x[k].add_((b * of_buffer).add_(d, alpha=of_drift), alpha=-rule.lr)
        b.mul_(kept).add_(d, alpha=q / work)
    return x, s

"""How far apart replicas are to be expected, given how far apart their drifts are.

With the state u of `gossamer.core.consensus` (deviations from the mean over workers) a round that hears the drifts g is

    u+ = (A0 + A1 Lambda) u + (b0 + b1 Lambda) g,      Lambda = I - W_t,   b1 = eta A1 e1,   b0 = -b1

since g enters where x is mixed: the three forms mix z = x + eta g (outer: x + g, its eta is in A1). In form local momentum takes a
worker's own z as well, which adds eta (gamma, 1) to b0. Combine while adapt is x+ = W x + g.
Drifts are taken to be white: uncorrelated between workers, between rounds and with u, E[g_i . g_j] = q^2 n/(n - 1) (delta_ij - 1/n) with
q^2 = mean_i |g_i - gbar|^2 as measured. Then the covariance C of u, shape [2n, 2n], obeys

    C+ = A C A^T + q^2 n/(n - 1) B B^T,                chi = sqrt(trace C_xx / n)

exactly, on the very graphs of the run. In the mean over graphs, plain averaging (eta = 1, no momentum) among random peers makes this

    chi_{t+1}^2 = rho^2 (chi_t^2 + q_t^2),   and in the long run   chi = q rho / sqrt(1 - rho^2),     rho = 1 - spectral gap.

Where the measured distance lies below, inner steps pull workers together (all descend into one valley); above, they push them apart.

>>> half = np.full((2, 2), 0.5)
>>> law = response(CombineWhileAdapt())
>>> [round(v, 6) for v in expected(law, [half] * 3, [1.0, 1.0, 2.0])]
[1.0, 1.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.core.consensus import transition
from gossamer.core.outer import CombineWhileAdapt, Gossip, Outer

MOST = 256
"""Workers up to which covariances are kept."""


class Response(NamedTuple):
    """How the state of the disagreement moves: A0, A1 of shape [2, 2] and b0, b1 of shape [2]."""

    a0: NDArray[np.float64]
    a1: NDArray[np.float64]
    b0: NDArray[np.float64]
    b1: NDArray[np.float64]


def response(outer: Outer) -> Response | None:
    """Of an outer rule of gossip; None for one whose step is not linear, or not known here."""
    if isinstance(outer, CombineWhileAdapt):
        return Response(np.diag([1.0, 0.0]), np.diag([-1.0, 0.0]), np.array([1.0, 0.0]), np.zeros(2))
    if isinstance(outer, Gossip) and outer.linear:
        a0, a1 = transition(outer.form, outer.lr, outer.momentum, outer.nesterov)
        inputs = drift_lr(outer) * a1[:, 0]
        # The look-ahead of form "local" takes a worker's own z, mixed or not.
        own = np.array([outer.momentum, 1.0]) * outer.lr if outer.form == "local" else np.zeros(2)
        return Response(a0, a1, own - inputs, inputs)
    return None


def drift_lr(outer: Outer) -> float:
    """eta of what is mixed, x + eta g: 1 in form outer, whose rate acts later; 0 where x itself is mixed."""
    if isinstance(outer, CombineWhileAdapt):
        return 0.0
    return outer.lr if isinstance(outer, Gossip) and outer.form != "outer" else 1.0


def expected(
    law: Response,
    mixings: Sequence[NDArray[np.float64]],
    drifts: Sequence[float],
    there: Sequence[NDArray[np.bool_]] | None = None,
) -> list[float]:
    """chi after each round, from equal workers.

    Args:
        mixings: W of each round, shape [n, n].
        drifts: q of each round.
        there: who takes part in each round, and counts in its chi; everybody by default.
    """
    n = len(mixings[0])
    c = np.zeros((2 * n, 2 * n))
    out = []
    for w, q, present in zip(mixings, drifts, there or [np.ones(n, bool)] * len(mixings), strict=True):
        k = max(1, int(present.sum()))
        pi = np.diag(present.astype(float)) - np.outer(present, present) / k
        lam = np.eye(n) - w
        a = np.kron(law.a0, np.eye(n)) + np.kron(law.a1, lam)
        b = np.kron(law.b0[:, None], np.eye(n)) + np.kron(law.b1[:, None], lam)
        c = a @ c @ a.T
        if k > 1:
            c += q * q * k / (k - 1) * (b @ pi @ b.T)
        out.append(float(np.sqrt(max(0.0, np.trace(pi @ c[:n, :n])) / k)))
    return out

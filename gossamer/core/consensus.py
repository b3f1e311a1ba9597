"""How fast replicas agree: the exact root-mean-square contraction per round of (form, topology, eta, alpha, gamma), without drift.

At g = 0 the outer step is linear in the parameters. With Lambda = I - W_t (alpha included) the three forms of GASLoC are

    local   x+ = x - Lambda x + gamma*(x - x_prev)                              state (x, x_prev)
    mixed   z = W x;  x+ = z + gamma*(z - z_prev)                               state (x, z_prev)
    outer   D = Lambda x;  m+ = gamma*m + D;  x+ = x - eta*(D + gamma*m+)       state (x, m), torch's Nesterov
            heavy ball (nesterov=False):      x+ = x - eta*m+

so the state u follows u+ = (A0 + A1 Lambda) u with 2 x 2 matrices A0 and A1.

Overlap (`gossamer.core.cadence`) changes none of it: where what is said in round t lands under round t + 1, anchors still take the outer
step from x_t and W (x_t + g_t) to x_{t+1}, so without drift they follow the same recursion, and a worker's own parameters are its anchors
one landing late. The delay enters where the drift depends on where it was taken. With inner steps that close `pull` of the distance to an
optimum in a round, and y what a worker has at the end of one,

    y+ = q2 (x+ + (q1 - 1) y),     q1 = (1 - pull)^overlap before the landing,   q2 = (1 - pull)^(1 - overlap) after it

is a third component of the state, and `rate` with `pull` the growth of that. Overlap 0: y+ = (1 - pull) x+.

`rate` is how much the disagreement, the deviation from the
mean over workers, grows per round, as a root mean square: below 1 replicas agree, at 1 or above momentum tears them apart.

- Random peers, all workers alike: E[Lambda] = l1 pi and E[Lambda^2] = l2 pi, so the second moments of the state obey the closed system
  A0(x)A0 + l1 (A0(x)A1 + A1(x)A0) + l2 A1(x)A1 ((x): Kronecker product), and the rate is the square root of its spectral radius. Exact.
- The same with a mean over all workers every so many rounds (`gossamer.core.averaging`): the product of those systems, Lambda = pi in the
  last, over a period. Exact.
- Fixed circulant graphs (ring, complete, one_peer_exp): one 2 x 2 matrix per Fourier mode and round of the period. Exact.
- Random peers on an admissible graph, or drawn by link (`gossamer.core.matching`): the law of W is replaced by the first
  `SAMPLES` rounds of the schedule, which is then treated exactly (n <= `SMALL`); otherwise, and for fixed topologies of one's
  own, the growth along the schedule is measured. Estimates: within 1 % of the exact rate where that is known, too low where agreement
  takes more than about 100 rounds (long chains).

Source: the forms are those of Cagnasso, Belilovsky and Oyallon 2026, sec. 3 and App. E.1; the moment argument is ours.

>>> from gossamer.core.topology import OnePeer
>>> round(rate("outer", OnePeer(8, seed=0), lr=0.8, momentum=0.7), 3)
0.839
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gossamer.core.averaging import Averaged
from gossamer.core.errors import BadInput
from gossamer.core.rng import Stream, normal
from gossamer.core.topology import Complete, OnePeer, OnePeerExp, Ring, Topology, TwoPeer

Form: TypeAlias = Literal["local", "mixed", "outer"]
"""Where momentum acts: on a worker's own look-ahead, on the mixed one, or in an outer optimizer."""

SAMPLES = 256
"""Rounds that stand for the law of a random restricted topology."""
SMALL = 16
"""Workers up to which second moments of such a topology are kept, shape [2n, 2n] ([3n, 3n] with a drift)."""
LONG, FEWER, MANY = 1000, 200, 1000
"""Rounds along which growth is measured for larger ones; fewer from so many workers on, who make up for it."""
PULLS = (0.5, 0.9, 0.99, 0.999)
"""Drifts at which overlapped gossip is looked at."""
WINDOW = 10
"""Rounds over which growth is squared and averaged there."""


def rate(
    form: Form,
    topology: Topology,
    *,
    lr: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = True,
    pull: float = 0.0,
    overlap: float = 0.0,
) -> float:
    """Root-mean-square growth of the disagreement per round; >= 1: replicas never agree. 0 for one worker.

    `lr` (eta) and `nesterov` concern the form "outer" alone: without drift the others do not see the outer learning rate. `pull` is the
    share of the distance to an optimum that a round's inner steps close, 0 without drift; `overlap` matters only with it.

    Raises:
        BadInput: an unknown form, lr <= 0, momentum outside [0, 1), pull or overlap outside [0, 1].
    """
    if form not in get_args(Form):
        raise BadInput(f"unknown form of momentum {form!r}: known are {', '.join(get_args(Form))}")
    if not (math.isfinite(lr) and lr > 0):
        raise BadInput(f"outer learning rate {lr}: expected a finite number above 0")
    if not 0 <= momentum < 1:
        raise BadInput(f"outer momentum {momentum}: expected 0 <= momentum < 1")
    if not (0 <= pull <= 1 and 0 <= overlap <= 1):
        what = f"overlap = {overlap}" if 0 <= pull <= 1 else f"pull = {pull}"
        raise BadInput(f"{what}: expected a share of a round, from 0 to 1")
    if topology.n == 1:
        return 0.0
    a0, a1 = drifting(form, lr, momentum, nesterov, pull, overlap) if pull else transition(form, lr, momentum, nesterov)
    if isinstance(topology, Ring | Complete | OnePeerExp):
        return _fixed(a0, a1, topology)
    base, every = (topology.base, topology.every) if isinstance(topology, Averaged) else (topology, 1)
    if (known := moments(base)) is not None:
        step = np.linalg.matrix_power(_second(a0, a1, *known), every - 1) if every > 1 else np.eye(len(a0) ** 2)
        step = _second(a0, a1, *(known if every == 1 else (1.0, 1.0))) @ step
        return float(np.abs(np.linalg.eigvals(step)).max() ** (0.5 / every))
    if topology.random and topology.n <= SMALL:
        return _sampled(a0, a1, topology)
    return _measured(a0, a1, topology)


def _second(a0: NDArray[np.float64], a1: NDArray[np.float64], l1: float, l2: float) -> NDArray[np.float64]:
    """How the second moments of the state move in a round."""
    return np.asarray(np.kron(a0, a0) + l1 * (np.kron(a0, a1) + np.kron(a1, a0)) + l2 * np.kron(a1, a1), np.float64)


def worst_rate(
    form: Form, topology: Topology, *, lr: float = 1.0, momentum: float = 0.0, nesterov: bool = True, overlap: float = 0.0
) -> float:
    """The largest `rate` that any drift towards an optimum makes. Without overlap that is the rate without drift; with it a drift
    that was taken before the mixing and comes after it can overshoot, where inner steps go most of the way to the optimum."""
    pulls = (0.0, *(PULLS if exact(topology) else PULLS[-1:])) if overlap else (0.0,)
    return max(rate(form, topology, lr=lr, momentum=momentum, nesterov=nesterov, pull=p, overlap=overlap) for p in pulls)


def rounds_to(rate: float, eps: float = 1e-3) -> float:
    """Rounds until the disagreement has shrunk by `eps` at a constant rate, ln(eps)/ln(rate); infinite at a rate >= 1."""
    if not 0 < eps < 1:
        raise BadInput(f"eps = {eps}: expected a number between 0 and 1")
    if rate >= 1:
        return math.inf
    return math.log(eps) / math.log(rate) if rate > 0 else 1.0


def best_momentum(form: Form, topology: Topology, *, lr: float = 1.0, nesterov: bool = True) -> tuple[float, float]:
    """The gamma of the smallest rate, and that rate; a grid search refined until gamma is known to 1e-8.

    On the fixed ring, form "local", gamma = (1 - sqrt(chi))^2 and the rate is 1 - sqrt(chi), chi = 1 - (largest eigenvalue of W below 1).

    Raises:
        BadInput: the rate of this topology is only an estimate, too slow and too rough to search with.
    """
    if not exact(topology):
        raise BadInput(f"{type(topology).__name__} has no exact rate to search with: compare a few values of momentum with rate() instead")
    lo, hi = 0.0, 1.0 - 1e-9
    while True:
        grid = np.linspace(lo, hi, 21)
        rates = [rate(form, topology, lr=lr, momentum=float(g), nesterov=nesterov) for g in grid]
        k = int(np.argmin(rates))
        if hi - lo < 1e-8:
            return float(grid[k]), rates[k]
        lo, hi = float(grid[max(0, k - 1)]), float(grid[min(20, k + 1)])


def spectral_gap(topology: Topology) -> float:
    """1 - (rms contraction per round of plain averaging): 1 - |second eigenvalue| of a fixed symmetric W, 1 - sqrt(spectral radius of
    E[W^2] on disagreements) of a random one. 1 means agreement in one round, 0 none ever."""
    return 1.0 - rate("local", topology)


def exact(topology: Topology) -> bool:
    """Whether `rate` is exact for this topology, or an estimate."""
    base = topology.base if isinstance(topology, Averaged) else topology
    return topology.n == 1 or isinstance(topology, Ring | Complete | OnePeerExp) or moments(base) is not None


def moments(topology: Topology) -> tuple[float, float] | None:
    """(l1, l2) with E[Lambda] = l1 pi and E[Lambda^2] = l2 pi, pi = I - 11^T/n, for one_peer and two_peer among workers that may all
    talk; None for any other topology."""
    if not isinstance(topology, OnePeer | TwoPeer) or topology.admissible is not None:
        return None
    n, alpha = topology.n, topology.alpha
    if n == 1:
        return 0.0, 0.0
    l1 = n / (2 * (n - 1)) if n % 2 == 0 or isinstance(topology, TwoPeer) else 0.5
    l2 = 3 * n / (8 * (n - 1)) if isinstance(topology, TwoPeer) and n > 2 else l1
    return alpha * l1, alpha**2 * l2


def transition(form: Form, lr: float, momentum: float, nesterov: bool = True) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(A0, A1), each [2, 2], of u+ = (A0 + A1 Lambda) u; the states are those in the module's first lines."""
    g = momentum
    a0: list[list[float]]
    a1: list[list[float]]
    match form:
        case "local":
            a0, a1 = [[1 + g, -g], [1, 0]], [[-1, 0], [0, 0]]
        case "mixed":
            a0, a1 = [[1 + g, -g], [1, 0]], [[-1 - g, 0], [-1, 0]]
        case "outer" if nesterov:
            a0, a1 = [[1, -lr * g * g], [0, g]], [[-lr * (1 + g), 0], [1, 0]]
        case "outer":
            a0, a1 = [[1, -lr * g], [0, g]], [[-lr, 0], [1, 0]]
    return np.array(a0, np.float64), np.array(a1, np.float64)


def drifting(
    form: Form, lr: float, momentum: float, nesterov: bool, pull: float, overlap: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(A0, A1), each [3, 3], with a drift: the state is that of `transition`, and y. A0 alone moves the mean over workers towards the
    optimum."""
    g, x, m, y = momentum, *np.eye(3)
    z = (1 - lr) * x + lr * y
    match form:
        case "local":
            rows = (z + g * (z - m), z), (-z, 0 * z)
        case "mixed":
            rows = (z + g * (z - m), z), (-(1 + g) * z, -z)
        case "outer":
            d, from_b = x - y, g if nesterov else 1.0
            own = 1.0 if nesterov else 0.0
            rows = (x - lr * (own * d + from_b * (g * m + d)), g * m + d), (-lr * (own + from_b) * y, y)
    before, after = (1 - pull) ** overlap, (1 - pull) ** (1 - overlap)
    (x0, m0), (x1, m1) = rows
    return np.array([x0, m0, after * (x0 + (before - 1) * y)]), np.array([x1, m1, after * x1])


def _fixed(a0: NDArray[np.float64], a1: NDArray[np.float64], topology: Ring | Complete | OnePeerExp) -> float:
    """Every W of the schedule is circulant: its eigenvalues on the Fourier modes 1..n-1 are the transform of row 0."""
    period = topology.period if isinstance(topology, OnePeerExp) else 1
    product = np.broadcast_to(np.eye(len(a0), dtype=np.complex128), (topology.n - 1, *a0.shape))
    for t in range(period):
        row = np.zeros(topology.n)
        for j, w in topology.at(t).row(0):
            row[j] = w
        chi = 1.0 - np.fft.fft(row)[1:]
        product = (a0 + chi[:, None, None] * a1) @ product
    if len(a0) > 2:
        return float(np.abs(np.linalg.eigvals(product)).max() ** (1.0 / period))
    # Eigenvalues of a 2 x 2 matrix from trace and determinant.
    half = (product[:, 0, 0] + product[:, 1, 1]) / 2
    root = np.sqrt(half**2 - (product[:, 0, 0] * product[:, 1, 1] - product[:, 0, 1] * product[:, 1, 0]))
    radius = max(float(np.abs(half + root).max()), float(np.abs(half - root).max()))
    return float(radius ** (1.0 / period))


def _sampled(a0: NDArray[np.float64], a1: NDArray[np.float64], topology: Topology) -> float:
    """Power iteration of C <- mean_r A_r C A_r^T on the covariance of the state, shape [2n, 2n] ([3n, 3n] with a drift), for A_r of the
    sampled rounds. A mean over all workers, Lambda = pi, comes in its turn; less often than every 100 rounds it is left out."""
    base, every = (topology.base, topology.every) if isinstance(topology, Averaged) else (topology, 1)
    every = every if every <= 100 else 1
    n, rounds = topology.n, 2 * every * math.ceil(100 / every)
    pi = np.eye(n) - 1.0 / n
    steps = np.stack([np.kron(a0, pi) + np.kron(a1, pi - pi @ base.at(t).dense()) for t in range(SAMPLES)])
    mean = np.kron(a0 + a1, pi)
    c = np.kron(np.eye(len(a0)), pi)
    log_growth = 0.0
    for t in range(rounds):
        c = mean @ c @ mean.T if every > 1 and (t + 1) % every == 0 else (steps @ c @ steps.transpose(0, 2, 1)).mean(axis=0)
        size = float(np.trace(c))
        if size <= 0:
            return 0.0
        c /= size
        log_growth += math.log(size) if t >= rounds // 2 else 0.0
    return math.exp(log_growth / (rounds - rounds // 2) / 2)


def _measured(a0: NDArray[np.float64], a1: NDArray[np.float64], topology: Topology) -> float:
    """Mean-square growth of 16 random disagreements over windows of `WINDOW` rounds along the schedule itself, after one tenth of
    the `LONG` rounds to settle. Windows, because a plain average of logarithms gives the typical growth, which is below the rms."""
    n, k, rounds = topology.n, 16, LONG if topology.n < MANY else FEWER
    x = normal(n * k, 0, Stream.INIT).reshape(n, k) / math.sqrt(n * k)
    u = np.stack([x, *[np.zeros_like(x)] * (len(a0) - 1)])
    logs = []
    for t in range(rounds):
        u = u - u.mean(axis=1, keepdims=True)
        lu = np.stack([v - topology.at(t).apply(v) if a1[:, k].any() else np.zeros_like(v) for k, v in enumerate(u)])
        u = np.tensordot(a0, u, 1) + np.tensordot(a1, lu, 1)
        size = math.sqrt(float((u * u).sum()))
        if size <= 1e-14:
            return 0.0
        u = u / size
        logs.append(math.log(size))
    windows = np.array(logs[rounds // 10 :]).reshape(-1, WINDOW).sum(axis=1)
    return float(np.mean(np.exp(2 * windows)) ** (1 / (2 * WINDOW)))

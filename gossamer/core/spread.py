"""How far the delay of one worker spreads, and how many rounds apart gossip lets workers be. Read off the graphs, nothing is timed.

A worker waits for its peers of the round alone. Let worker s be held up in round r. Then round r is held up for s and for those who hear s
in it; round r + 1 for these and for those who hear one of them in that; and so on:

    A_0 = {s} + out_r(s)            A_k = A_{k-1} + out_{r+k}(A_{k-1})

Whoever is not in A_k completes round r + k as if nothing had happened. When A_k is everybody, nobody can go further: the rounds up to there
are the most that anybody can be ahead of s. That bound needs no talking and no barrier: it is the graph's.

    complete 0      ring floor((n - 1) / 2)      random pairs and cycles: about the logarithm of n (A doubles, or triples, per round)

>>> from gossamer.core.topology import Ring
>>> [sorted(a) for a in spread(Ring(6), worker=0, round=4)]
[[0, 1, 5], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]]
>>> ahead(Ring(6), worker=0, round=4)
2
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from gossamer.core.topology import Topology

_MOST_ROUNDS = 100_000


def spread(topology: Topology, worker: int, round: int, lag: int = 0) -> Iterator[frozenset[int]]:
    """A_0, A_1, ... up to everybody (or to where a graph in pieces ends): who cannot complete round + k while `worker` is in `round`.

    lag: 1 where what a worker says of its round lands a round later (overlap), or was said before the inner steps (dadam, local_dadam):
    then nobody but itself is held up in `round`.
    """
    held = {worker}
    for k in count():
        if k >= lag:
            mixing = topology.at(round + k)
            held |= {i for j in held for i in mixing.out(j)}
        yield frozenset(held)
        if len(held) == topology.n or k > _MOST_ROUNDS:
            return


def ahead(topology: Topology, worker: int, round: int, lag: int = 0) -> int:
    """The most rounds that anybody can have completed more than `worker`, which is in `round`."""
    return sum(len(held) < topology.n for held in spread(topology, worker, round, lag))

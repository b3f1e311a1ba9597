"""Start-up, comparisons, and messages outside the programs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from net_toys import all_but, in_threads

from gossamer.core.combine import mean
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import Tree
from gossamer.net import init, over_gloo
from gossamer.real import Group


def tree_of(i: int, rows: int = 1000) -> Tree:
    g = torch.Generator().manual_seed(i)
    return {"w": torch.randn(rows, 7, generator=g), "b": torch.randn((), generator=g), "none": torch.empty(0)}


@pytest.mark.parametrize("to", [0, 2])
def test_bytes_are_gathered_in_id_order(to: int) -> None:
    """Of all lengths, nothing and megabytes included, several times in a row."""
    said = [[b"", b"x" * 3_000_000, bytes(range(256))][(i + k) % 3] + bytes([i]) * (i % 2) for k in range(3) for i in range(3)]

    def job(group: Group) -> list[list[bytes] | None]:
        return [group.gather_bytes(said[3 * k + group.me], to) for k in range(3)]

    results = in_threads(3, job)
    assert results[to] == [said[0:3], said[3:6], said[6:9]]
    assert all(results[j] == [None] * 3 for j in all_but(to, 3))


@pytest.mark.parametrize("n", [1, 3])
def test_the_mean_is_that_of_the_simulator_bit_for_bit(n: int) -> None:
    def job(group: Group) -> tuple[Tree | None, int, int]:
        return group.mean_trees(tree_of(group.me)), group.apart_sent_bytes, group.apart_received_bytes

    results = in_threads(n, job)
    want = mean([tree_of(i) for i in range(n)])
    got = results[0][0]
    assert got is not None and list(got) == list(want)
    assert all(torch.equal(got[k], want[k]) and got[k].shape == want[k].shape for k in want)
    size = 4 * 7001 + 8
    assert [r[1] for r in results] == [0] + [size] * (n - 1)
    assert results[0][2] == (n - 1) * size
    assert all(r[0] is None for r in results[1:])


def test_the_mean_leaves_the_trees_alone() -> None:
    def job(group: Group) -> bool:
        tree = tree_of(group.me)
        group.mean_trees(tree)
        return all(torch.equal(tree[k], v) for k, v in tree_of(group.me).items())

    assert in_threads(2, job) == [True, True]


def test_trees_of_unlike_sizes_are_refused() -> None:
    with pytest.raises(RunFailed, match="worker 1 has 71 parameters, expected 64"):
        in_threads(2, lambda g: g.mean_trees(tree_of(0, rows=9 + g.me)))


@pytest.mark.parametrize("n, odd", [(2, 1), (3, 0), (4, 2)])
def test_a_difference_is_found_before_anything_is_sent(n: int, odd: int) -> None:
    seen: dict[int, str] = {}

    def job(group: Group) -> None:
        group.all_equal({"run id": 7, "configuration": "same"})
        try:
            group.all_equal({"run id": 7, "parameter layout": 10 + (group.me == odd)})
        except RunFailed as error:
            seen[group.me] = str(error)
            raise

    with pytest.raises(RunFailed, match=f"worker {odd} has another parameter layout than the others \\(11, expected 10\\)"):
        in_threads(n, job)
    assert len(set(seen.values())) == 1 and len(seen) == n


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RunFailed, match=r"worker 0 has waited 0 s at the start for worker\(s\) 1, 2"):
        over_gloo(dist.HashStore(), 0, 3, local=True, start_timeout_s=0.05)


@pytest.mark.parametrize(
    "env, message",
    [({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": "x", "WORLD_SIZE": "2"}, "numbers"), ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR")],
)
def test_an_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GOSSAMER_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=message):
        init()


def test_without_an_environment_there_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "GOSSAMER_STORE"):
        monkeypatch.delenv(name, raising=False)
    with init() as group:
        assert (group.me, group.n) == (0, 1)
        assert group.gather_bytes(b"me") == [b"me"]

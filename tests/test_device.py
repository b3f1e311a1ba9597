"""Parameters on another device: where everything lives, what crosses, and that the bits are the CPU's. No GPU is needed; see `far`."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cadences
import numpy as np
import pytest
import torch
from far import DEVICE, Far, accelerator
from lockstep import Lockstep
from small_runs import corpus, settings
from test_codec import CODECS, same_bits
from test_codec_write import SIGNS, finish, odd_tree
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from toy import ToyBody, toy_start

from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import Job, resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.app.train import NetHooks, work
from gossamer.core.codec import Codec, Fp32, Sign, write
from gossamer.core.combine import Piece, combine, mean
from gossamer.core.feedback import Feedback
from gossamer.core.inner import AdamW
from gossamer.core.method import Method
from gossamer.core.plan import uniform
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree, digest, layout_of, master, sha256, squares
from gossamer.recipes import ddp, diloco, gasloc, local_dadam, sparse_loco
from gossamer.train import checkpoint
from gossamer.train.data import Sampler
from gossamer.train.offload import Offloaded
from gossamer.worker.effects import Done, Work
from gossamer.worker.state import State

METHODS: dict[str, Method] = {
    name: replace(cadences.METHODS[name], rounds=2) for name in ("gather_eager_streaming", "shard_eager", "streaming_diloco")
} | {
    make.__name__: make(replace(cadences.UNEQUAL, plan=uniform(4, 2, 2, ToyBody.LENGTH), rounds=2, inner=AdamW(lr=0.01)))
    for make in (diloco, sparse_loco, gasloc, local_dadam, ddp)
}


@pytest.fixture
def device() -> Iterator[torch.device]:
    with accelerator() as found, torch.no_grad():
        yield found


def there(tree: Mapping[str, Any]) -> Tree:
    return {k: Far(v) for k, v in tree.items()}


def here(tree: Mapping[str, Any]) -> Tree:
    return {k: v.cpu() for k, v in tree.items()}


class FarBody(ToyBody):
    """A toy whose parameters, as the program sees them, are elsewhere; live views of those it trains."""

    def compute(self, work: Work) -> Done:
        if work.tree is not None:
            work = work._replace(tree=here(work.tree))
        with torch.enable_grad(), _disable_current_modes():
            done = super().compute(work)
        return done._replace(tree=there(done.tree or {}))

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        assert all(v.device == DEVICE for v in tree.values())
        super().load(here(tree), reset_inner)


def trees(state: State) -> dict[str, Tree]:
    """All trees of a state, by where they are kept."""
    found = {"x": state.x, "others": state.others, "local": state.local, **{f"outer {k}": v for k, v in state.outer.items()}}
    found |= {"residual": state.residual or {}, "mean_residual": state.mean_residual or {}}
    return found | {f"y {p}": stream.pending.y for p, stream in enumerate(state.streams) if stream.pending}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_elsewhere_has_the_bits_of_one_here(name: str, device: torch.device, tmp_path: Path) -> None:
    method = METHODS[name]
    with torch.enable_grad(), _disable_current_modes():
        wanted = Lockstep(method)
        wanted.run()
    got = Lockstep(method, [FarBody(i, method.inner) for i in range(method.n)], x0=[there(toy_start()) for _ in range(method.n)])
    got.run()
    for round in (1, 2):
        for i in range(method.n):
            a, b = trees(wanted.snapshots[round][i][0]), trees(got.snapshots[round][i][0])
            assert all(v.device == device for tree in b.values() for v in tree.values()), "all of the state is where the model is"
            assert a.keys() == b.keys() and all(same_bits(tree, here(b[k])) for k, tree in a.items())
    # A checkpoint of it is the same file, and is read back to where it was.
    a, b = wanted.snapshots[1][0][0], got.snapshots[1][0][0]
    sha = checkpoint.write_part(tmp_path, 1, 0, b, {})
    checkpoint.close(tmp_path, 1, 0, {0: sha})
    assert sha == checkpoint.write_part(tmp_path / "here", 1, 0, a, {})
    back = checkpoint.read_part(tmp_path, 1, 0, device).state
    assert all(v.device == device for tree in trees(back).values() for v in tree.values())
    assert all(same_bits(here(tree), here(trees(back)[k])) for k, tree in trees(b).items())


@pytest.mark.parametrize("codec", CODECS + SIGNS, ids=str)
def test_a_mean_is_formed_where_the_parameters_are(codec: Codec, device: torch.device) -> None:
    tree = odd_tree()
    layout = layout_of(tree, by_row=("embed",))
    out = torch.zeros(codec.nbytes(layout), dtype=torch.uint8)
    lost = codec.encode(tree, layout, codec.stats(tree, layout), out)
    pieces = [Piece(layout, w, out) for w in (0.25, 0.3125, 0.4375)]
    wanted, got = combine(pieces, codec, tree), combine(pieces, codec, there(tree))
    assert all(v.device == device for v in got.values())
    assert same_bits(wanted, here(got))
    if codec in CODECS:  # sums of signs may differ in the last bit of a float64
        far = torch.zeros_like(out)
        assert codec.encode(there(tree), layout, codec.stats(there(tree), layout), far) == lost
        assert torch.equal(out, far)


def test_the_signs_cross_as_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as a tensor crosses to the host: a bit a number, its magnitudes and sums, and marks of replicas."""
    crossed: Counter[str] = Counter()
    original = Tensor.cpu

    def cpu(self: Tensor) -> Tensor:
        crossed["bytes"] += self.nbytes if self.device == device else 0
        return original(self)

    tree, codec = {"w": torch.randn(300, 700)}, Sign()
    layout = layout_of(tree)
    x, residual = there(tree), there({"w": torch.zeros(300, 700)})
    monkeypatch.setattr(Tensor, "cpu", cpu)
    out = torch.zeros(codec.nbytes(layout), dtype=torch.uint8)
    finish(write(codec, x, layout, [(layout, out)], Feedback(), residual))
    combine([Piece(layout, 1.0, out)], codec, x)
    digest(x)
    assert out.numel() <= crossed["bytes"] < out.numel() + 100
    Fp32().encode(x, layout, {}, torch.zeros(Fp32().nbytes(layout), dtype=torch.uint8))
    assert crossed["bytes"] > 4 * 210_000, "or nothing is counted"


def test_marks_and_norms_are_the_same_elsewhere(device: torch.device) -> None:
    tree = odd_tree() | {f"n{k}": torch.randn(k) for k in range(20)} | {"half": torch.randn(7, 3).to(torch.bfloat16)}
    far = there(tree)
    assert digest(far) == digest(tree)
    assert sha256(far) == sha256(tree)
    assert digest(far) != digest(there(tree | {"n3": tree["n3"].neg()}))
    norm = squares(list(far.values()))
    assert norm.device == device
    torch.testing.assert_close(norm.cpu(), squares(list(tree.values())), rtol=1e-13, atol=0)
    assert same_bits(here(mean([far, far])), mean([tree, tree]))
    assert all(v.device == device for v in master(far).values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_squares_are_summed_in_float64_and_hide_nothing(bad: float, device: torch.device) -> None:
    tensors = [torch.randn(3, 70_001) * 1e15, torch.zeros(0), torch.tensor(1e-20), torch.full((5, 4), 3e38)[:, ::2]]
    wanted = sum(float((t.double() ** 2).sum()) for t in tensors)
    torch.testing.assert_close(squares(tensors), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)
    assert float(squares([])) == 0.0
    tensors[0][1, 60_000] = bad
    assert not torch.isfinite(squares(tensors))
    assert not torch.isfinite(squares([Far(t) for t in tensors]).cpu())


def on_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **more: object) -> Job:
    """A small run whose models are elsewhere. Tensors of a test's kind lose their ties as a model is moved, so none are tied."""
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Job, "device", property(lambda self: DEVICE))
    sets = settings(corpus(tmp_path / "text"), run__rounds=2, checkpoint__every=1, checkpoint__keep=2, eval__sequences=1, **more)
    return resolve(load([], [s.replace("tie_word_embeddings = true", "tie_word_embeddings = false") for s in sets]))


def halved(whole: Path, out: Path) -> RunFolder:
    """The run in `whole` as it was after its first round."""
    shutil.copytree(whole, out)
    (out / "summary.json").unlink()
    shutil.rmtree(checkpoint.round_folder(out / "checkpoints", 2))
    return RunFolder(out)


def ending(folder: Path) -> list[str]:
    return list(json.loads((folder / "summary.json").read_text())["params_sha256"])


def test_a_simulation_elsewhere_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, method = tmp_path / "whole", {"exchange": '"shard"', "overlap": 0.5, "error_feedback": '"both"', "eager": "true"}
    job = on_device(
        monkeypatch, tmp_path, fleet__name="uniform-2", method__name="geomesh", **{f"method__{k}": v for k, v in method.items()}
    )
    with accelerator():
        simulate(job, whole, quiet=True)
        half = halved(whole, tmp_path / "half")
        simulate(job, resume=half, quiet=True)
    assert ending(half.path) == ending(whole)


def test_a_real_worker_elsewhere_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    job, whole = on_device(monkeypatch, tmp_path, fleet__name="uniform-1", method__name="diloco"), tmp_path / "whole"
    places = set()
    original = NetHooks.boundary

    def boundary(self: NetHooks, worker: int, round: int, time_s: float, state: State, body: Any) -> Any:
        places.update(v.device for tree in (state.x, *state.outer.values()) for v in tree.values())
        return original(self, worker, round, time_s, state, body)

    monkeypatch.setattr(NetHooks, "boundary", boundary)
    with accelerator():
        work(job, whole)
        half = halved(whole, tmp_path / "half")
        work(job, half.path, resume=True)
    assert places == {DEVICE}
    assert ending(half.path) == ending(whole)


@pytest.mark.parametrize("method", [{"name": '"geomesh"', "overlap": 0.5, "error_feedback": '"worker"'}, {"name": '"ddp"'}])
def test_offloaded_outer_state_is_on_the_host_with_the_bits_of_one_that_is_not(
    method: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is elsewhere, all that the program keeps is here; a run begun without goes on with."""
    places = set()
    original = SimHooks.boundary

    def boundary(self: SimHooks, worker: int, round: int, time_s: float, state: State, body: Any) -> Any:
        assert all(p.device == DEVICE for p in body.model.parameters())
        places.update(v.device for tree in trees(state).values() for v in tree.values())
        return original(self, worker, round, time_s, state, body)

    monkeypatch.setattr(SimHooks, "boundary", boundary)
    sets: dict[str, object] = {"fleet__name": "uniform-2", "model__dtype": '"bf16"', **{f"method__{k}": v for k, v in method.items()}}
    kept, away = (on_device(monkeypatch, tmp_path, run__offload=str(offload).lower(), **sets) for offload in (False, True))
    with accelerator():
        simulate(kept, tmp_path / "kept", quiet=True)
        assert places == {DEVICE}
        places.clear()
        simulate(away, tmp_path / "away", quiet=True)
    assert places == {torch.device("cpu")}
    assert ending(tmp_path / "away") == ending(tmp_path / "kept")
    if kept.method.name != "ddp":
        half = halved(tmp_path / "kept", tmp_path / "half")
        with accelerator():
            simulate(away, resume=half, quiet=True)
        assert ending(half.path) == ending(tmp_path / "kept")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloaded_parameters_pass_through_pinned_memory() -> None:
    body = Offloaded(torch.nn.Embedding(8, 4), AdamW(lr=0.01), Constant(), 1.0, Sampler(np.arange(9), 2, 0, 0), device="cuda")
    assert all(p.is_cuda for p in body.model.parameters()) and all(v.is_pinned() for v in body.tree.values())
    body.load({name: torch.ones_like(v) for name, v in body.tree.items()})
    assert all(bool((v == 1).all()) for v in body.tree.values()) and all(bool((p == 1).all()) for p in body.model.parameters())

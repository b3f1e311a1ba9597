"""Checkpoints: bits survive, damage is noticed and passed over, and what is old goes only when the new is whole."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import threading

import pytest
import torch

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.members import Roll
from gossamer.core.plan import Plan
from gossamer.core.ranges import rows_of
from gossamer.core.replan import Planned
from gossamer.train import checkpoint as K
from gossamer.train import parts, weights
from gossamer.train.parts import put
from gossamer.train.recut import Place
from gossamer.train.writing import Writer
from gossamer.worker.packet import HEADER_BYTES, Header, Packet, blank, seal
from gossamer.worker.state import Met, Pending, State, Stream


def tree(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    # out of alphabetical order, with a scalar, an empty and a slashed name
    return {k: torch.randn(s, generator=g).to(dtype) for k, s in (("w", (3, 5)), ("b/c", (4,)), ("a", ()), ("none", (0, 2)))}


def packet(round, slice):
    data = blank(10)
    data[HEADER_BYTES:] = torch.arange(10, dtype=torch.uint8) + slice
    return seal(data, Header(2**63 + 1, round, 4, 1, 3, 1, 2**64 - 1, 9, 12345, 1))


def full_state(round=12):
    x = tree(0)
    own = {0: packet(round, 0), 3: packet(round, 3)}
    met = Met(packet(round, 1), {0: 0.1, 3: 0.9}, (2,), {0: 0.25, 3: 1e-9}, (packet(round, 2), packet(round, 3)))
    streams = [
        Stream([0.1, math.inf], 5, Pending(round, own, x, met)),
        Stream([], 0, Pending(round, {0: packet(round, 2)}, {"other": tree(8)["w"]})),
    ]
    return State(
        x, round, 10**13 + 1, {"momentum": tree(1), "z": tree(2)}, tree(3), tree(4), tree(5), tree(6, torch.bfloat16), streams,
        Planned(2, 7, Plan((3, 1), (2, 4), 16), Plan((2, 2), (2, 4), 16), (0.5, 0.25), 1),
        Roll([(3, frozenset({1})), (9, frozenset({1, 2}))]),
        tree(7), tree(9, torch.uint8),
    )  # fmt: skip


BODY = {
    "cursor": 2**40,
    "exp_avg/w": tree(4, torch.bfloat16)["w"],
    "step/w": torch.tensor(3.0),
    "ratio": 0.1,
    "rng": torch.get_rng_state(),
    "on": True,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Packet):
        return a[:2] == b[:2] and same(a.data, b.data)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def write(folder, round, workers=(0, 1), keep=None):
    shas = {w: K.write_part(folder, round, w, full_state(round), BODY) for w in workers}
    K.close(folder, round, tokens=round * 100, parts=shas, keep=keep)
    return shas


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "state",
    [
        full_state(),
        State(tree(1)),
        State({}, residual={}, outer={"m": {}}),
        State(tree(1), streams=[Stream(pending=Pending(1, {0: Packet(packet(1, 0).header, 999, None)}, {}))]),
    ],
    ids=["all", "first", "empty", "timing-only"],
)
def test_bits_survive(tmp_path, state):
    extra = {"seed": 3, "names": ["a", "b"], "loss": 0.1 + 0.2}
    sha = K.write_part(tmp_path, 12, 5, state, BODY, extra)
    K.close(tmp_path, 12, 34, {5: sha}, extra={"method": "diloco"})
    part = K.read_part(tmp_path, 12, 5)
    assert same(part.state, state) and same(part.body, BODY) and part.extra == extra
    assert K.read_manifest(tmp_path, 12) == K.Manifest(12, 34, {5: (K.File("worker-5/rank-0.safetensors", sha),)}, {"method": "diloco"})
    assert files_of(tmp_path) == ["round-000012/manifest.json", "round-000012/worker-5/rank-0.safetensors"]  # no scratch is left


def test_every_field_of_the_state_is_saved():
    # A new field must be added to the checkpoint, and to full_state above.
    default = State({})
    assert all(not same(getattr(full_state(), f.name), getattr(default, f.name)) for f in dataclasses.fields(State))
    assert [f.name for f in dataclasses.fields(Pending)] == ["round", "own", "y", "met"]
    assert [f.name for f in dataclasses.fields(Stream)] == ["norms", "tokens", "pending"]
    assert Met._fields == ("mean", "weights", "refused", "step_s", "handed")


def test_same_state_same_bytes(tmp_path):
    assert write(tmp_path / "a", 1) == write(tmp_path / "b", 1)


def test_views_and_shared_memory(tmp_path):
    base = torch.arange(12.0)
    state = State({"a": base[:6].view(2, 3), "b": base[6:], "c": base.view(3, 4).t()}, outer={"m": {"a": base}})
    K.close(tmp_path, 1, 0, {0: K.write_part(tmp_path, 1, 0, state, {})})
    assert same(K.read_part(tmp_path, 1, 0).state, state)


def test_only_closed_rounds_count(tmp_path):
    assert K.latest(tmp_path / "none") is None
    K.write_part(tmp_path, 3, 0, full_state(3), BODY)
    assert K.latest(tmp_path) is None
    with pytest.raises(RunFailed, match="no whole checkpoint of round 3"):
        K.read_part(tmp_path, 3, 0)
    with pytest.raises(RunFailed, match="lacks the part of worker 1"):
        K.close(tmp_path, 3, 0, {0: "", 1: ""})
    assert K.latest(tmp_path) is None
    write(tmp_path, 2)
    assert K.latest(tmp_path) == 2
    write(tmp_path, 1_000_000)
    assert K.latest(tmp_path) == 1_000_000
    with pytest.raises(RunFailed, match=r"not worker 7.*Put its own back, or remove"):
        K.read_part(tmp_path, 2, 7)


def test_what_is_staged_does_not_change_any_more(tmp_path):
    state = full_state()
    part = K.stage(tmp_path, 12, 0, state, BODY)
    for t in state.x.values():
        t.zero_()
    state.round = 99
    K.close(tmp_path, 12, 0, {0: put(part)})
    assert same(K.read_part(tmp_path, 12, 0).state, full_state())


def test_a_checkpoint_of_the_former_format_is_read(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for module in (K, parts):
            patch.setattr(module, "FORMAT", 2)
        write(tmp_path, 3)
    here = K.round_folder(tmp_path, 3)
    manifest = (here / "manifest.json").read_text()
    for w in (0, 1):
        (here / f"worker-{w}" / "rank-0.safetensors").rename(here / f"worker-{w}.safetensors")
        (here / f"worker-{w}").rmdir()
        manifest = manifest.replace(f"worker-{w}/rank-0", f"worker-{w}")
    (here / "manifest.json").write_text(manifest)
    assert '"format": 2' in manifest and K.latest(tmp_path) == 3
    assert same(K.read_part(tmp_path, 3, 1).state, full_state(3))
    monkeypatch.setattr(parts, "READS", (3,))
    with pytest.raises(BadInput, match="has checkpoint format 2, this release reads 3: resume with the release that wrote it"):
        K.read_part(tmp_path, 3, 1)


ROWS = {"w": 5, "b": 2, "a": 1}


def of_rank(rank, ranks):
    """What a rank of a worker has: of 3 ranks of b, one has no row."""

    def cut(t, name):
        return t[slice(*rows_of(ROWS[name], ranks, rank))] if t.ndim else t

    g = torch.Generator().manual_seed(1)
    x = {"w": torch.randn(5, 3, generator=g), "b": torch.randn(2, generator=g), "a": torch.randn((), generator=g)}
    m = {name: v + 1 for name, v in x.items()}
    body = {"cursor": 7, "exp_avg/w": cut(x["w"] * 2, "w"), "step/w": torch.tensor(3.0), "rng": torch.full((4,), rank, dtype=torch.uint8)}
    state = State({k: cut(v, k) for k, v in x.items()}, 1, outer={"momentum": {k: cut(v, k) for k, v in m.items()}})
    whole = {f"x/{k}": v for k, v in x.items()} | {f"outer/momentum/{k}": v for k, v in m.items()}
    return state, body, whole | {"body/exp_avg/w": x["w"] * 2}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_worker_is_a_checkpoint_of_torch_distributed_checkpoint(tmp_path, ranks):
    """However many ranks it had: whole tensors come back, without a process group and without a pickle."""
    import torch.distributed.checkpoint as dcp

    shas = []
    for rank in range(ranks):
        state, body, want = of_rank(rank, ranks)
        shas.append(put(K.stage(tmp_path, 1, 4, state, body, place=Place(rank, ranks, ROWS))))
    K.close(tmp_path, 1, 0, {4: shas})
    folder = K.part_path(tmp_path, 1, 4).parent
    got = {name: torch.full_like(t, 9.0) for name, t in want.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(got, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert same(got, want)
    whole = K.read_part(tmp_path, 1, 4)
    assert same(whole.state.x, {k.removeprefix("x/"): v for k, v in want.items() if k.startswith("x/")})


def test_a_round_of_fewer_ranks_leaves_no_file_of_more(tmp_path):
    for rank in range(3):
        put(K.stage(tmp_path, 1, 4, *of_rank(rank, 3)[:2], place=Place(rank, 3, ROWS)))
    K.close(tmp_path, 1, 0, {4: put(K.stage(tmp_path, 1, 4, *of_rank(0, 1)[:2]))})
    assert files_of(tmp_path) == ["round-000001/manifest.json", "round-000001/worker-4/rank-0.safetensors"]


def fail(why):
    raise RunFailed(why)


def test_a_writer_works_in_order_and_fails_where_it_is_next_asked(tmp_path):
    done, go = [], threading.Event()
    with Writer() as writer:
        writer.do(lambda: (go.wait(10.0), done.append(1)))
        assert not done
        writer.check()  # not over, so there is nothing to tell
        go.set()
        writer.do(lambda: K.close(tmp_path, 1, 0, {0: "no part"}))
        assert done == [1]
        with pytest.raises(RunFailed, match="lacks the part"):
            writer.wait()
        writer.check()  # told once
        writer.do(lambda: fail("disk"))
        with pytest.raises(RunFailed, match="disk"):
            writer.do(lambda: done.append(2))
    with Writer(beside=False) as writer:
        writer.do(lambda: done.append(threading.current_thread()))
    assert done == [1, threading.current_thread()]


@pytest.mark.parametrize("error", [None, "first"])
def test_leaving_a_writer_waits_and_the_first_failure_is_told(error):
    def leave():
        with Writer() as writer:
            writer.do(lambda: fail("disk"))
            if error:
                fail(error)

    with pytest.raises(RunFailed, match=error or "disk"):
        leave()


def _truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [_truncate, _flip, lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
@pytest.mark.parametrize("file", ["worker-1/rank-0.safetensors", "manifest.json"])
def test_damage_falls_back_and_says_so(tmp_path, caplog, damage, file):
    write(tmp_path, 4)
    write(tmp_path, 5)
    assert K.latest(tmp_path) == 5
    damage(K.round_folder(tmp_path, 5) / file)
    with caplog.at_level(logging.WARNING):
        assert K.latest(tmp_path) == 4
    if (K.round_folder(tmp_path, 5) / "manifest.json").exists():
        assert "round 5 is passed over" in caplog.text and file in caplog.text
    with pytest.raises(RunFailed):
        K.read_part(tmp_path, 5, 1)
    assert same(K.read_part(tmp_path, 4, 1).state, full_state(4))


def swap(parts):
    parts["0"], parts["1"] = parts["1"], parts["0"]


ODD = {
    "no parts": (lambda about: about["parts"].clear(), "it has no parts of workers"),
    "no ranks": (lambda about: about["parts"].update({"0": {"ranks": []}}), "worker 0 has no parts"),
    "swapped": (lambda about: swap(about["parts"]), "the parts of worker 0 are worker-1/rank-0.safetensors, not worker-0/rank-0"),
    "no number": (lambda about: about["parts"].update({"x": about["parts"]["0"]}), "'x'"),
    "a list": (lambda about: about.update(parts=[1]), "has no attribute 'items'"),
    "no extra": (lambda about: about.pop("extra"), "it has no 'extra'"),
    "other round": (lambda about: about.update(round=4), "it is of round 4 after 500 tokens"),
    "tokens": (lambda about: about.update(tokens=-1), "it is of round 5 after -1 tokens"),
    "no format": (lambda about: about.pop("format"), "it has no 'format'"),
    "deep": (lambda about: about.update(extra="DEEP"), "recursion"),
    "no object": (lambda about: "[]", "it is no JSON object"),
    "a hash": (lambda about: about["parts"]["0"].update(sha256=1), "worker 0 has no parts"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_manifest_that_cannot_be_is_damage(tmp_path, caplog, name):
    write(tmp_path, 4)
    write(tmp_path, 5)
    path = K.round_folder(tmp_path, 5) / "manifest.json"
    about = json.loads(path.read_text())
    change, words = ODD[name]
    text = change(about)
    path.write_text(text if isinstance(text, str) else json.dumps(about).replace('"DEEP"', "[" * 100_000))
    assert K.latest(tmp_path) == 4
    assert f"round 5 is passed over: {path} is damaged: " in caplog.text and words in caplog.text
    with pytest.raises(RunFailed, match=r"is damaged: .* Put it back, or remove .*round-000005 to go on from an earlier"):
        K.read_part(tmp_path, 5, 0)


def test_another_release_and_another_worker_are_said(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 5)
    path = K.round_folder(tmp_path, 5) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 3', '"format": 9'))
    for read in (lambda: K.latest(tmp_path), lambda: K.read_part(tmp_path, 5, 0)):  # what it holds is not passed over
        with pytest.raises(BadInput, match=r"manifest.json has checkpoint format 9, this release reads 2 and 3: resume with the release"):
            read()
    path.write_text(text)
    about = json.loads(text)
    for w, other in ((0, 1), (1, 0)):  # the files themselves, and their hashes with them
        file = path.parent / f"worker-{w}" / "rank-0.safetensors"
        file.rename(path.parent / str(other))
    for w in (0, 1):
        (path.parent / str(w)).rename(path.parent / f"worker-{w}" / "rank-0.safetensors")
    zero, one = about["parts"]["0"], about["parts"]["1"]
    zero["sha256"], one["sha256"] = one["sha256"], zero["sha256"]
    path.write_text(json.dumps(about))
    for read in (lambda: K.read_part(tmp_path, 5, 0), lambda: weights.of_checkpoint(tmp_path, 5, [0])):
        with pytest.raises(RunFailed, match=r"is the part of worker 1 at round 5, and stands for that of worker 0 .*put each where it was"):
            read()


def test_a_write_that_fails_leaves_the_old_part_and_no_scratch(tmp_path, monkeypatch):
    shas = write(tmp_path, 4)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(RunFailed, match="No space left"):
            K.write_part(tmp_path, 4, 0, State(tree(9)), {})
        with pytest.raises(RunFailed, match="No space left"):
            K.close(tmp_path, 4, 0, shas)
    assert K.latest(tmp_path) == 4 and K.read_manifest(tmp_path, 4).tokens == 400
    here = "round-000004"
    assert files_of(tmp_path) == [f"{here}/{f}" for f in ("manifest.json", "worker-0/rank-0.safetensors", "worker-1/rank-0.safetensors")]
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match=r"cannot be written .*free some space or set another run folder"):
        K.write_part(tmp_path / "file", 4, 0, State(tree(9)), {})


def test_a_round_written_again_counts_once_closed_again(tmp_path, caplog):
    write(tmp_path, 4)
    write(tmp_path, 5)
    sha = K.write_part(tmp_path, 5, 0, State(tree(9)), BODY)  # a run that fell back passes round 5 once more
    assert K.latest(tmp_path) == 4
    K.close(tmp_path, 5, 500, {0: sha})
    assert K.latest(tmp_path) == 5 and "passed over" in caplog.text


def test_old_rounds_go_only_when_the_new_one_is_whole(tmp_path):
    for round in (1, 2, 3):
        write(tmp_path, round, keep=2)
    folders = lambda: sorted(p.name for p in tmp_path.iterdir())  # noqa: E731
    assert folders() == ["round-000002", "round-000003"]
    K.write_part(tmp_path, 4, 0, full_state(), BODY)  # open rounds: nothing goes, and they stay
    K.write_part(tmp_path, 5, 0, full_state(), BODY)
    assert folders() == [f"round-00000{r}" for r in (2, 3, 4, 5)]
    write(tmp_path, 4, keep=2)
    assert folders() == [f"round-00000{r}" for r in (3, 4, 5)]
    with pytest.raises(BadInput, match="at least 1"):
        K.close(tmp_path, 4, 0, {}, keep=0)


def test_a_half_deleted_round_does_not_count(tmp_path, monkeypatch):
    write(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # the process dies before the folder is gone
    write(tmp_path, 2, keep=1)
    assert K.closed(tmp_path) == [2]

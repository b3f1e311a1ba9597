"""From a model of one's own to accuracies: a checkpoint, continued by two workers on parquet, exported, loaded by transformers and asked by
lm-eval. By the commands that a user types, and without a network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import command, flags
from zeroshot_toys import chains, write_items

from gossamer.app import trained
from gossamer.app.config import load as read_config
from gossamer.app.job import resolve
from gossamer.core.tree import sha256
from gossamer.train.model import parameters_of

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.timeout(300)]  # all that a user does in turn

STEPS, ROUNDS, SEQUENCE = 25, 2, 48
END = "[END]"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chains(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def parquet(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts as two files of a table, its column of another name than the usual one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, lines = tmp_path_factory.mktemp("parquet"), []
    for path in sorted(texts.iterdir()):
        words = path.read_text().split()
        lines += [" ".join(words[at : at + 130]) for at in range(0, len(words), 130)]
    for k in range(2):
        pq.write_table(pa.table({"n": list(range(len(lines[k::2]))), "content": lines[k::2]}), folder / f"part-{k}.parquet")
    return folder


@pytest.fixture(scope="module")
def checkpoint(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 and its tokenizer, made and saved by transformers alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train([str(path) for path in texts.iterdir()], trainer)
    folder = tmp_path_factory.mktemp("checkpoint")
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    words.save_pretrained(folder)
    end = words.eos_token_id
    shape = GPT2Config(vocab_size=len(words), n_layer=2, n_embd=32, n_head=2, n_positions=96, bos_token_id=end, eos_token_id=end)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        GPT2LMHeadModel(shape).save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom this process wanted to reach beyond this machine, which is refused. (What the workers load stands on HF_HUB_OFFLINE.)"""
    asked: list[Any] = []
    connect, resolved = socket.socket.connect, socket.getaddrinfo
    here = ("127.0.0.1", "::1", "localhost", "", None, socket.gethostname())

    def only_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in here:
            asked.append(address)
            raise OSError(f"no network in this test: {address}")
        connect(self, address)

    def names_of_here(host: Any, *more: Any, **how: Any) -> Any:
        if host not in here:
            asked.append(host)
            raise socket.gaierror(f"no network in this test: {host}")
        return resolved(host, *more, **how)

    monkeypatch.setattr(socket.socket, "connect", only_here)
    monkeypatch.setattr(socket, "getaddrinfo", names_of_here)
    return asked


def test_a_model_of_ones_own_is_continued_exported_loaded_and_evaluated(
    checkpoint: Path, parquet: Path, texts: Path, no_network: list[Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, model, out = tmp_path / "run", tmp_path / "model", tmp_path / "found.json"
    values = {
        "model.checkpoint": checkpoint, "data.tokenizer": checkpoint, "data.source": parquet, "data.text": "content",
        "data.valid_documents": 24, "method.name": "diloco", "fleet.name": "uniform-2", "inner.name": "adamw", "inner.lr": 1e-2,
        "plan.steps": STEPS, "plan.batch": 8, "plan.sequence": SEQUENCE, "run.rounds": ROUNDS, "run.device": "cpu", "eval.sequences": 16,
        "eval.batch": 16,
    }  # fmt: skip
    sets = [f"{key}={value}" for key, value in values.items()]
    code, said = command("train", *flags(sets), "--workers", "2", "--out", str(run))
    assert code == 0, said

    # 50 steps of each worker, and the loss has fallen: from that of the checkpoint to that of the end.
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] * STEPS == 50 and summary["tokens"] == 50 * 2 * 8 * SEQUENCE
    job = resolve(read_config([run / "config.toml"]))
    judge = job.judge(job.corpus())
    before = AutoModelForCausalLM.from_pretrained(checkpoint)
    began, ended = judge(dict(parameters_of(before))), summary["final_loss"]
    assert ended < began - 1.0
    rounds = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "round"]
    per_round = [[r["loss"] for r in rounds if r["round"] == k] for k in (1, 2)]
    assert all(len(losses) == 2 for losses in per_round) and max(per_round[1]) < min(per_round[0]) < began

    # What transformers loads is what the workers ended with, bit for bit.
    assert command("export", str(run), "--to", str(model))[0] == 0
    card = (model / "README.md").read_text()
    assert f"| continued from | {checkpoint} |" in card and "packed as they come" in card
    theirs, words = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert type(theirs) is type(before) and words.eos_token == END
    tensors = {name: p.detach() for name, p in theirs.named_parameters()}
    assert [sha256(tensors)] * 2 == summary["params_sha256"]
    ids = words("the worker sends what it has learned", return_tensors="pt").input_ids
    ours = trained.load(run).model
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, ours(input_ids=ids).logits)
        assert not torch.equal(theirs(input_ids=ids).logits, before(input_ids=ids).logits)
    assert torch.equal(
        ids, AutoTokenizer.from_pretrained(checkpoint)("the worker sends what it has learned", return_tensors="pt").input_ids
    )

    # lm-eval asks the export the embedded suite, on which it is above chance, and items on disk; and the run, of its own held-out rows.
    items = write_items(tmp_path / "items", ["arc_easy", "winogrande"])
    code, said = command("eval", str(model), "--data", str(items), "--text", str(texts), "--limit", "40", "--out", str(out))
    assert code == 0, said
    tasks = json.loads(out.read_text())["tasks"]
    assert list(tasks) == ["word_order", "cloze", "arc_easy", "winogrande"]
    assert [tasks[name]["items"] for name in tasks] == [40, 40, 4, 4]
    assert tasks["word_order"]["verdict"] == "above chance"
    assert command("eval", str(run), "--tasks", "word_order", "--limit", "40")[0] == 0
    assert json.loads((run / "eval.json").read_text())["tasks"]["word_order"]["verdict"] == "above chance"
    assert no_network == []

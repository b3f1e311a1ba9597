"""Models from checkpoints, adapters, frozen parameters, activation checkpointing, attention, compiled blocks."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import settings

from gossamer.app import trained
from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import Job, resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.app.wan.spec import spec_of
from gossamer.cli import main
from gossamer.core.errors import BadInput, Stopped
from gossamer.core.tree import layout_of, numel
from gossamer.train import model as M
from gossamer.train import pretrained
from gossamer.train.adapt import merged
from gossamer.train.checkpoint import part_path
from gossamer.train.compute import mean_loss
from gossamer.train.evaluate import evaluate
from gossamer.train.pretrained import folder_of
from gossamer.train.shard import compile_blocks
from gossamer.train.source import Adapter, Source
from gossamer.train.tokenizer import as_transformers
from gossamer.wan.roster.differing import differences
from gossamer.worker.effects import Work
from gossamer.worker.packet import HEADER_BYTES

pytestmark = pytest.mark.usefixtures("cache")


def test_a_folder_that_is_not_there_is_told_which_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ckpt").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, meant in (("ckp", "ckpt"), (str(tmp_path / "ckp"), str(tmp_path / "ckpt"))):
        with pytest.raises(BadInput, match=f"model.checkpoint.*Did you mean the folder '{re.escape(meant)}'"):
            folder_of(Source(checkpoint=given))
    with pytest.raises(BadInput) as error:
        folder_of(Source(checkpoint="nothing-like-it"))
    assert "Did you mean" not in str(error.value)


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
"""As small_runs has it."""
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}
VOCAB = 257
LORA = Adapter(rank=2, alpha=4.0)
X = torch.arange(34).view(2, 17)
HIDDEN = 2 * (4 * 32**2 + 3 * 32 * 64)
"""Weights of the matrices of LLAMA's blocks."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the first weights of seed 0."""
    folder = tmp_path_factory.mktemp("checkpoint")
    M.build(LLAMA, VOCAB, seed=0).save_pretrained(folder)
    return folder


def job_of(text: Path, **more: object) -> Job:
    return resolve(load([], settings(text, **{"fleet__name": '"uniform-2"', "method__name": '"diloco"', "run__rounds": 2, **more})))


def run(job: Job, out: Path) -> dict:
    return json.loads((simulate(job, out, quiet=True).path / "summary.json").read_text())


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    p, q = dict(a.named_parameters()), dict(b.named_parameters())
    return list(p) == list(q) and all(torch.equal(p[k], q[k]) and p[k].requires_grad == q[k].requires_grad for k in p)


def gradients(source: Source) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model = M.build(source, VOCAB, seed=0)
    torch.manual_seed(1)  # of dropout
    loss = mean_loss(model, X)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_a_checkpoint_of_the_first_weights_goes_on_as_that_seed_begins(saved: Path, text: Path, tmp_path: Path) -> None:
    assert same(M.build(Source(checkpoint=str(saved)), None, seed=7), M.build(LLAMA, VOCAB, seed=0))
    adapted = [M.build(Source(shape, checkpoint=c, adapter=LORA), VOCAB, seed=3) for shape, c in (("tiny", str(saved)), (LLAMA, ""))]
    drawn = [M.parameters_of(m) for m in adapted]
    assert all(torch.equal(drawn[0][k], drawn[1][k]) for k in drawn[1]), "an adapter does not depend on where the base is from"
    want = run(job_of(text), tmp_path / "seed")
    got = run(job_of(text, model__config='""', model__checkpoint=f'"{saved}"'), tmp_path / "checkpoint")
    assert got["params_sha256"] == want["params_sha256"] and len(set(got["params_sha256"])) == 1
    assert got["final_loss"] == want["final_loss"]
    other = run(job_of(text, seed=1, model__config='""', model__checkpoint=f'"{saved}"'), tmp_path / "other")
    assert other["params_sha256"] != want["params_sha256"], "another order of the data"


@pytest.mark.parametrize("adapter", [None, Adapter(2, 4.0, dropout=0.2)])
@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_activation_checkpointing_leaves_every_bit(shape: dict, adapter: Adapter | None) -> None:
    source = Source(shape, adapter=adapter)
    (loss, grads), (again, recomputed) = gradients(source), gradients(Source(shape, adapter=adapter, activation_checkpointing=True))
    assert torch.equal(loss, again) and grads.keys() == recomputed.keys()
    for name, g in grads.items():
        r = recomputed[name]
        assert (g is None) == (r is None) and (g is None or r is None or torch.equal(g, r)), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it from people, not from a filter that raises
def test_compiled_blocks_keep_their_names_and_compute_the_same() -> None:
    shape = {**LLAMA, "num_hidden_layers": 1}
    plain, model = M.build(shape, VOCAB, 0), M.build(shape, VOCAB, 0)
    compile_blocks(model, "aot_eager")
    assert list(M.parameters_of(model)) == list(M.parameters_of(plain)) and list(model.state_dict()) == list(plain.state_dict())
    for m in (plain, model):
        mean_loss(m, X).backward()  # type: ignore[no-untyped-call]
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_eager_attention_is_another_way_to_the_same_numbers() -> None:
    models = [M.build(Source(LLAMA, attention=a), VOCAB, 0) for a in ("eager", "sdpa")]
    assert [m.config._attn_implementation for m in models] == ["eager", "sdpa"]
    torch.testing.assert_close(*(mean_loss(m, X) for m in models))


def test_what_is_frozen_is_neither_trained_nor_in_the_layout() -> None:
    def frozen(*patterns: str) -> set[str]:
        model = M.build(Source(LLAMA, freeze=patterns), VOCAB, 0)
        assert M.layout(model) == M.meta_layout(Source(LLAMA, freeze=patterns), VOCAB)
        left = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert left.isdisjoint(part.name for part in M.layout(model))
        return left

    names = [name for name, _ in M.build(LLAMA, VOCAB, 0).named_parameters()]
    assert "lm_head.weight" not in names, "tied: once, by its first name"
    assert frozen("lm_head") == frozen("model.embed_tokens.weight") == {"model.embed_tokens.weight"}
    assert frozen("model.layers.0") == {n for n in names if n.startswith("model.layers.0.")}
    assert frozen("*.[qk]_proj.*", "*norm*") == {n for n in names if "q_proj" in n or "k_proj" in n or "norm" in n}
    thin = M.build(Source(LLAMA, adapter=LORA, freeze=("*lora_A*",)), VOCAB, 0)
    assert all("lora_B" in name for name in M.parameters_of(thin))


def test_a_tied_tensor_travels_once_and_a_frozen_one_never(text: Path, tmp_path: Path) -> None:
    sent = {}
    for name, more in {"tied": {}, "frozen": {"model__freeze": '["model.embed_tokens"]'}}.items():
        job = job_of(text, **more)
        found = run(job, tmp_path / name)
        sent[name] = found["bytes_sent"][0] / found["rounds"]
        tensors = M.parameters_of(job.model())
        assert len({p.data_ptr() for p in tensors.values()}) == len(tensors)
        assert sent[name] == 2 * HEADER_BYTES + job.method.codec.nbytes(layout_of(tensors)) == 2 * HEADER_BYTES + 4 * found["parameters"]
    assert sent["tied"] - sent["frozen"] == 4 * VOCAB * 32
    names = [part.name for part in job_of(text).layout]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


def test_only_the_bytes_of_an_adapter_travel_and_are_kept(saved: Path, text: Path, tmp_path: Path) -> None:
    """Real runs: test_real_processes_end_with_the_bits_of_the_simulation."""
    adapted = {"model__config": '""', "model__checkpoint": f'"{saved}"', "model__adapter": "{rank = 2, alpha = 4.0}"}
    job = job_of(text, **adapted)
    found = run(job, tmp_path / "run")
    adapter = {name: p for name, p in job.model().named_parameters() if ".lora_" in name}
    size = job.method.codec.nbytes(layout_of(adapter))
    assert size == 4 * sum(p.numel() for p in adapter.values()) == 4 * 2 * (2 * (4 * 64 + 3 * 96))
    assert found["bytes_sent"] == found["bytes_received"] == [found["rounds"] * (2 * HEADER_BYTES + size)] * 2
    assert found["parameters"] == size / 4 and found["frozen_parameters"] == M.parameter_count(LLAMA, VOCAB)
    kept = load_file(part_path(tmp_path / "run" / "checkpoints", 2, 0))
    assert all(".lora_" in name for name in kept if "weight" in name) and any(name.startswith("x/") for name in kept)
    assert job.layout == M.layout(job.model()) and numel(job.layout) == found["parameters"]
    whole = trained.load(tmp_path / "run")
    assert type(whole.model).__name__ == "LlamaForCausalLM" and "model.embed_tokens.weight" in dict(whole.model.named_parameters())
    e, sequence = job.config.eval, job.config.plan.sequence
    assert evaluate(whole.model, job.corpus(), e.sequences, sequence).loss == pytest.approx(found["final_loss"], rel=1e-6)
    signs = job_of(text, method__name='"geomesh"', **adapted)
    assert run(signs, tmp_path / "signs")["bytes_sent"] == [2 * (HEADER_BYTES + signs.method.codec.nbytes(signs.layout))] * 2


def test_workers_of_one_process_share_what_none_of_them_trains(saved: Path, text: Path) -> None:
    job = job_of(text, model__config='""', model__checkpoint=f'"{saved}"', model__adapter="{rank = 2}", model__dtype='"bf16"')
    bodies = [job.body(i, job.corpus()) for i in range(2)]
    a, b = (dict(body.model.named_parameters()) for body in bodies)
    before = {name: p.clone() for name, p in b.items()}
    bodies[0].compute(Work(1, 2, 0.0, 32.0))
    for name, p in a.items():
        assert (p.data_ptr() == b[name].data_ptr()) == (not p.requires_grad), name
        assert torch.equal(b[name], before[name]), name
    assert any(not torch.equal(p, before[name]) for name, p in a.items())


def test_a_checkpoint_beside_an_adapter_is_read_once(saved: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its mark, for all workers of the process, and for the judge; and once to look at what came of it."""
    read: list[Source] = []
    load_weights = pretrained.load
    monkeypatch.setattr(pretrained, "load", lambda source, *given: read.append(source) or load_weights(source, *given))
    job = job_of(text, model__config='""', model__checkpoint=f'"{saved}"', model__adapter="{rank = 2}")
    run(job, tmp_path / "run")
    assert len(read) == 1
    trained.load(tmp_path / "run")
    assert len(read) == 2
    judge, workers = job.models.judge(), [job.models.worker() for _ in range(2)]
    before = {name: p.clone() for name, p in workers[1].named_parameters()}
    with torch.no_grad():
        for p in M.parameters_of(workers[0]).values():
            p.add_(1.0)
    for model in (judge, workers[1]):
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "what is trained is each one's own"
    assert same(job.models.whole(), job.model()) and len(read) == 3


def test_a_run_of_an_adapter_that_was_stopped_goes_on_bit_for_bit_and_only_on_its_base(
    saved: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(saved, base)
    more = {"model__config": '""', "model__checkpoint": f'"{base}"', "model__adapter": "{rank = 2, dropout = 0.1}", "run__rounds": 3}
    began = job_of(text, **more)
    want, described = run(began, tmp_path / "whole"), spec_of(began, began.corpus())
    original = SimHooks.boundary

    def interrupt(self, worker, round, time_s, state, body):  # type: ignore[no-untyped-def]
        self.stop_asked = self.stop_asked or round == 1
        return original(self, worker, round, time_s, state, body)

    with monkeypatch.context() as patch:
        patch.setattr(SimHooks, "boundary", interrupt)
        with pytest.raises(Stopped, match="--resume"):
            run(job_of(text, **more), tmp_path / "cut")
    weights = base / "model.safetensors"
    whole = load_file(weights)
    save_file({**whole, "model.norm.weight": whole["model.norm.weight"] * 2}, weights, metadata={"format": "pt"})
    assert main(["simulate", "--resume", str(tmp_path / "cut")]) == 2
    assert "not trained of the model, which comes from model.checkpoint" in capsys.readouterr().err
    said = differences(described, spec_of(job_of(text, **more), began.corpus()))
    assert said.startswith("the parameters of the model that are not trained (mark) = "), "as a site that comes with them hears it"
    save_file(whole, weights, metadata={"format": "pt"})
    folder = simulate(resolve(load([tmp_path / "cut" / "config.toml"])), resume=RunFolder.existing(tmp_path / "cut"), quiet=True)
    assert json.loads((folder.path / "summary.json").read_text())["params_sha256"] == want["params_sha256"]


def test_an_adapted_model_may_be_merged_into_one() -> None:
    model = M.build(Source(LLAMA, adapter=LORA), VOCAB, 0)
    with torch.no_grad():
        for p in M.parameters_of(model).values():
            p.normal_(0, 0.1)
        want = mean_loss(model, X)
        one = merged(model)
        torch.testing.assert_close(mean_loss(one, X), want)
    assert list(dict(one.named_parameters())) == list(dict(M.build(LLAMA, VOCAB, 0).named_parameters()))


def test_in_16_bits_the_base_is_what_is_judged_and_the_adapter_keeps_32(text: Path) -> None:
    job = job_of(text, model__adapter="{rank = 2}", model__dtype='"bf16"')
    held, judged = dict(job.models.worker().named_parameters()), dict(job.model().named_parameters())
    for name, p in held.items():
        assert p.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
        assert torch.equal(p.float(), judged[name]), name
    assert all(part.dtype == torch.float32 for part in job.layout)
    assert all(part.dtype == torch.bfloat16 for part in job_of(text, model__dtype='"bf16"').layout)


def test_plans_count_what_is_trained(text: Path) -> None:
    """Of a weight that stays the gradient is not formed: 4 operations, or 2 where none before it is trained either."""
    table, norms, attention = VOCAB * 32, 5 * 32, 12 * 2 * 32 * 16
    plain, top = job_of(text), job_of(text, model__freeze='["model.embed_tokens", "model.layers.0"]')
    assert plain.flops_per_token == 6 * (table + HIDDEN + norms) + attention
    block = (HIDDEN + 4 * 32) // 2
    assert top.flops_per_token == 4 * table + 2 * block + 6 * (block + 32) + attention
    again = job_of(text, model__activation_checkpointing="true")
    assert again.flops_per_token == 6 * table + 8 * (HIDDEN + norms) + attention * 16 / 12

    def fixed(job: Job) -> float:
        return job.charged.footprint(job.method).fixed_bytes

    each = fixed(plain) / plain.outline.meta.num_parameters()
    adapted = job_of(text, model__adapter="{rank = 2}", model__dtype='"bf16"')
    assert fixed(top) == each * numel(top.layout) + 4 * (table + block)
    assert fixed(adapted) == each * numel(adapted.layout) + 2 * numel(plain.layout)
    assert again.charged.footprint(again.method).token_bytes < plain.charged.footprint(plain.method).token_bytes
    bigger = job_of(text, model__adapter="{rank = 2}", clock__charge_as='"small"')
    assert bigger.bytes_charge == pytest.approx(numel(bigger.charged.layout) / numel(bigger.layout), rel=0.01)
    assert numel(bigger.charged.layout) == M.PRESETS["small"].layers * 2 * (4 * 2 * 256 + 3 * (256 + 704))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model__checkpoint": '"{text}"'}, "has no config.json"),
        ({"model__checkpoint": '"{bare}"'}, "has no weights in"),
        ({"model__checkpoint": '"{torn}"'}, "lacks 1 tensors of a 'llama' language model, such as model.norm.weight"),
        ({"model__config": '{model_type = "gpt_neo", num_layers = 1, attention_types = [[["global"], 1]]}', "model__attention": '"sdpa"'},
         "cannot have sdpa attention"),
        ({"model__attention": '"flash_attention_2"'}, 'set model.attention = "sdpa"'),
        ({"model__config": '{model_type = "ctrl", n_layer = 1, n_embd = 16, n_head = 2, dff = 16}',
          "model__activation_checkpointing": "true"}, "does not support activation checkpointing"),
        ({"model__freeze": '["model.embed_toks"]'}, "names are like 'model.embed_tokens.weight'"),
        ({"model__freeze": '["*"]'}, "leaves nothing to train"),
        ({"model__adapter": '{rank = 2, targets = ["q_pro"]}'}, "did you mean 'q_proj'"),
        ({"model__adapter": '{rank = 2, whole = ["lm_heads"]}'}, "did you mean 'lm_head'"),
        ({"model__adapter": "{alpha = 2.0}"}, "model.adapter.rank = 0 means no adapter"),
        ({"model__adapter": "{rnk = 2}"}, "did you mean model.adapter.rank"),
        ({"model__checkpoint": '"x"', "model__config": '{model_type = "gpt2"}'}, "both given"),
        ({"model__revision": '"main"'}, "model.checkpoint is not given"),
    ],
)  # fmt: skip
def test_refuses(more: dict[str, str], says: str, saved: Path, text: Path, tmp_path: Path) -> None:
    bare, torn = tmp_path / "bare", tmp_path / "torn"
    for folder in (bare, torn):
        folder.mkdir()
        shutil.copy(saved / "config.json", folder)
    whole = load_file(saved / "model.safetensors")
    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, torn / "model.safetensors", metadata={"format": "pt"})
    given = {"model__config": '""'} if "model__checkpoint" in more else {}
    for key, value in more.items():
        given[key] = value.replace("{text}", str(text)).replace("{bare}", str(bare)).replace("{torn}", str(torn))

    def build() -> None:
        job = job_of(text, **given)
        job.corpus()
        job.model()

    with pytest.raises(BadInput, match=re.escape(says)):
        build()


def test_a_tokenizer_that_has_the_checkpoints_symbols_is_taken(tmp_path: Path, text: Path, saved: Path) -> None:
    """One that has not: tests/test_bad_input.py."""
    more = {"model__config": '""', "model__checkpoint": f'"{tmp_path}"'}
    shutil.copy(saved / "model.safetensors", tmp_path)
    shutil.copy(saved / "config.json", tmp_path)
    as_transformers("bytes").save_pretrained(tmp_path)
    assert job_of(text, **more).outline.symbols == 257
    assert job_of(text, data__tokenizer=f'"{tmp_path}"', **more).corpus().vocab_size == 257


def test_peft_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BadInput, match=r"pip install 'gossamer\[peft\]'"):
        M.meta_model(Source(LLAMA, adapter=LORA), VOCAB)


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    """save_pretrained draws one."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_the_hub_is_asked_once_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has under the name may be another model a moment later."""
    asked: list[object] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["allow_patterns"]))
        (tmp_path / f"{len(asked)}").mkdir()
        (tmp_path / f"{len(asked)}" / "config.json").touch()
        return str(tmp_path / f"{len(asked)}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = Source(checkpoint="some-people/a-model-that-is-asked-for-once")
    assert folder_of(source) == folder_of(source) == tmp_path / "1" and len(asked) == 1

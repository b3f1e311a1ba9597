"""A run's model taken elsewhere: transformers loads it, offline, and it says what it said here, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small_runs import settings

from gossamer.app.config import load as read_config
from gossamer.app.export import export
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.app.trained import load
from gossamer.cli import main
from gossamer.core.combine import mean
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import sha256
from gossamer.train import checkpoint
from gossamer.train.model import parameters_of

pytestmark = pytest.mark.usefixtures("cache")


def run(text: Path, out: Path, **more: object) -> Path:
    sets = settings(text, **{"fleet__name": '"uniform-2"', "checkpoint__every": 2, **more})
    return simulate(resolve(read_config([], sets)), out, quiet=True).path


@pytest.fixture(scope="module")
def gossip(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers that differ, with an exchange in flight at the end, and a tokenizer trained on the data."""
    out = tmp_path_factory.mktemp("gossip") / "run"
    words = {"data__tokenizer": '"bpe"', "data__vocab_size": 300}
    return run(text, out, fleet__name='"uniform-4"', method__name="gasloc", method__overlap=1.0, checkpoint__keep=3, **words)


@pytest.fixture(scope="module")
def exported(gossip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(gossip), "--to", str(to)]) == 0
    return to


def test_transformers_loads_it_with_the_same_bits_and_generates(gossip: Path, exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    found = load(gossip)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    text = "the worker sends what it has learned"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert torch.equal(ids, found.tokenizer(text, return_tensors="pt").input_ids)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, found.model(input_ids=ids, use_cache=False).logits)
    said = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, max_new_tokens=4, do_sample=False)
    assert said[0]["generated_text"].startswith(text) and len(said[0]["generated_text"]) > len(text)


def test_whoever_may_read_other_files_may_read_a_model(gossip: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    files = [path for folder in (gossip, exported) for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "other").stat().st_mode}
    assert any("rank-0" in path.name for path in files)


def test_tied_parameters_are_stored_once(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", framework="pt") as f:
        names = set(f.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    config = json.loads((exported / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["eos_token_id"] is not None
    assert config.get("pad_token_id") is None, "the end mark would not be trained by whoever goes on from here"


def test_the_card_says_what_was_done(gossip: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    summary = json.loads((gossip / "summary.json").read_text())
    for said in (f"{summary['final_perplexity']:.4g}", "gasloc", "mean over 4 workers", f"{summary['tokens']:,}", "bpe", "library_name"):
        assert said in card
    round2 = load(gossip, 2)
    assert round2.round == 2 and round2.tokens < summary["tokens"]


def test_the_end_of_a_run_is_what_its_summary_measured(gossip: Path, text: Path) -> None:
    found = load(gossip)
    summary = json.loads((gossip / "summary.json").read_text())
    job = resolve(found.config)
    assert job.judge(job.corpus())(dict(parameters_of(found.model))) == summary["final_loss"]
    assert (found.round, found.tokens, found.workers) == (4, summary["tokens"], (0, 1, 2, 3))


def test_a_round_is_the_mean_of_its_workers(gossip: Path) -> None:
    parts = [checkpoint.read_part(gossip / "checkpoints", 2, w).state.x for w in range(4)]
    assert sha256(parts[0]) != sha256(parts[1])
    got = {k: v.detach() for k, v in parameters_of(load(gossip, 2).model).items()}
    assert sha256(got) == sha256(mean(parts))


def test_of_a_synchronous_run_the_model_is_what_all_hold(text: Path, tmp_path: Path) -> None:
    path = run(text, tmp_path / "run", method__name="diloco", model__dtype='"bf16"', run__rounds=1, checkpoint__every=0)
    found = load(path)
    assert (
        sha256({k: v.detach() for k, v in parameters_of(found.model).items()})
        == json.loads((path / "summary.json").read_text())["params_sha256"][0]
        == json.loads((path / "summary.json").read_text())["model_sha256"]
    )
    to = export(path, tmp_path / "out")
    with safe_open(to / "model.safetensors", framework="pt") as f:
        tensor = f.get_tensor("model.norm.weight")
    assert tensor.dtype == torch.bfloat16  # as the run had it
    assert torch.equal(tensor, parameters_of(found.model)["model.norm.weight"].to(torch.bfloat16))
    with pytest.raises(BadInput, match="is not empty"):
        export(path, to)
    assert main(["export", str(path), "--to", str(to)]) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about names that peft still uses
def test_an_adapter_alone_goes_on_the_checkpoint_that_it_was_trained_beside(exported: Path, text: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    sets = {"model__checkpoint": f'"{exported}"', "model__config": '""', "data__tokenizer": f'"{exported}"', "model__adapter__rank": 2}
    path = run(text, tmp_path / "run", method__name="diloco", run__rounds=1, checkpoint__every=0, **sets)
    to = export(path, tmp_path / "adapter", adapter=True)
    names = {p.name for p in to.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= names and "model.safetensors" not in names
    there = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(exported), to)
    here = load(path, merge=False).model
    ids = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        said = there(input_ids=ids).logits
        assert torch.equal(said, here(input_ids=ids, use_cache=False).logits)
        assert not torch.equal(said, AutoModelForCausalLM.from_pretrained(exported)(input_ids=ids).logits)


def test_what_cannot_be_exported_is_said(gossip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else: tests/test_bad_input.py."""
    with pytest.raises(BadInput, match=r"no checkpoint of round 3: there are rounds 2, 4"):
        load(gossip, 3)
    for name, target, words in (("dangling", "nowhere", "where there is nothing"), ("to folder", tmp_path, "and a folder is not put")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(BadInput, match=f"{name} is a link to {target}, {words}.*: remove the link, or choose another folder with --to"):
            export(gossip, tmp_path / name)
    with pytest.raises(BadInput, match="has no adapter"):
        export(gossip, tmp_path / "x", adapter=True)
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "x")]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a limit on the size of files may end the process")
@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_disk_that_is_full_is_said_and_nothing_stays(
    what: str, gossip: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    from gossamer.app import export as module

    sizes = {"model": 20_000, "tokenizer": 4_000}
    assert all(
        (exported / name).stat().st_size > sizes[key] for key, name in (("model", "model.safetensors"), ("tokenizer", "tokenizer.json"))
    )
    if what == "tokenizer":  # the model gets through
        monkeypatch.setattr(module, "_write", lambda found, to: found.tokenizer.save_pretrained(to))
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[what], most))
    try:
        code = main(["export", str(gossip), "--to", str(tmp_path / "x")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    said = capsys.readouterr().err
    assert code == 1 and "x cannot be written (" in said and "File too large" in said and "Traceback" not in said
    assert not any(tmp_path.iterdir())


def test_damage_is_said(gossip: Path, text: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(gossip, copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(RunFailed, match="damaged"):
        load(copy)
    whole = bytearray((gossip / "model.safetensors").read_bytes())
    whole[-100] ^= 0x40  # in a number, which no format would miss
    (copy / "model.safetensors").write_bytes(whole)
    with pytest.raises(RunFailed, match=r"model.safetensors is damaged, or of another run: .* Put it back"):
        export(copy, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    (copy / "model.safetensors").write_bytes((gossip / "model.safetensors").read_bytes())
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"tokens": summary["tokens"] + 1}))
    with pytest.raises(RunFailed, match=rf"of another run: .* after {summary['tokens'] + 1} tokens"):
        load(copy)
    (copy / "summary.json").write_text("[]")
    with pytest.raises(BadInput, match="is damaged: expected an object"):
        load(copy)
    del summary["model_sha256"]  # of an earlier release
    (copy / "summary.json").write_text(json.dumps(summary))
    assert load(copy).round == 4
    assert load(copy, 4).round == 4
    part = next((copy / "checkpoints").glob("round-000004/**/*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\0")
    with pytest.raises(RunFailed, match="is damaged"):
        load(copy, 4)

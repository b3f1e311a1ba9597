"""Bad input through the command line: exit code 2, a message that names value, expectation and remedy, and nothing created."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_runs import corpus, flags, settings

from gossamer.cli import main
from gossamer.train import model, tokenizer

NO_LINK = """
name = "torn"
[[sites]]
name = "a"
region = "here"
gpu = "A100 80GB"
up_mbps = 100
down_mbps = 100
[[sites]]
name = "b"
region = "there"
gpu = "A100 80GB"
up_mbps = 100
down_mbps = 100
[[links]]
from = "here"
to = "there"
rate_mbps = 100
rtt_ms = 10
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))


CASES = {
    "unknown key": (["plan.step=3"], ["plan.step", "plan.steps"]),
    "unknown section": (["plam.steps=3"], ["plam", "plan"]),
    "unknown option": (["method.name=gasloc", "method.topolgy=ring"], ["topolgy", "topology"]),
    "odd and perfect": (
        ["method.name=gasloc", "method.topology=one_peer", "method.perfect=true", 'fleet.name="uniform-5"'],
        ["5", "perfect"],
    ),
    "no steps": (["plan.steps=0"], ["plan.steps = 0", "1"]),
    "perplexity below 1": (["eval.target_perplexity=0.5"], ["target_perplexity", "0.5", "1"]),
    "lossy ring": (["method.name=diloco", "method.codec=sign", "method.exchange=ring"], ["ring", "sign", "gather or shard"]),
    "lossless feedback": (["method.codec=fp32", "method.error_feedback=true"], ["feedback", "fp32"]),
    "mean feedback without a second signing": (["method.error_feedback=mean"], ["error feedback", "gather", "shard"]),
    "more fragments than tensors": (["method.name=streaming_diloco", "method.fragments=500"], ["500 fragments", "tensors"]),
    "eager without overlap": (["method.name=diloco", "method.eager=true"], ["eager", "set overlap"]),
    "diverging gossip": (
        [
            "method.name=gasloc",
            "method.topology=one_peer",
            "method.momentum=local",
            "method.outer_momentum=0.9",
            'fleet.name="straggler-8"',
        ],
        ["1.08", "outer_momentum", "force"],
    ),
    "both lengths": (["run.rounds=3", "run.tokens=1000"], ["run.tokens"]),
    "unknown fleet": (['fleet.name="azure-5"'], ["azure-5", "azure-4"]),
    "unknown model": (['model.preset="tinny"', 'model.config=""'], ["tinny", "tiny"]),
    "unknown checkpoint": (['model.checkpoint="HuggingFaceTB/SmolLM2-13M"', 'model.config=""'], ["SmolLM2-13M", "folder", "hf download"]),
    "no such checkpoint": (
        ['model.checkpoint="models/smolm/last"', 'model.config=""'],
        ["there is no folder", "models/smolm/last", "config.json", "the hub"],
    ),
    "wrong worker count": (["fleet.workers=3"], ["azure-4", "4", "3"]),
    "one optimizer, no rate": (['inner.name="muon"'], ["inner.lr"]),
}


@pytest.mark.parametrize("command", ["simulate", "train"])
@pytest.mark.parametrize("case", CASES)
def test_bad_settings(case: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, words = CASES[case]
    if case == "both lengths":
        path = tmp_path / "both.toml"
        path.write_text("[run]\nrounds = 3\ntokens = 1000\n")
        arguments = [str(path)]
    else:
        arguments = flags([*settings(corpus(tmp_path / "text")), *bad])
    out = tmp_path / "run"
    size = {"odd and perfect": "5", "diverging gossip": "8"}.get(case, "4")
    workers = ["--workers", size] if command == "train" else []
    assert main([command, *arguments, *workers, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said, said
    assert not out.exists()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said, said


def test_a_tokenizer_that_is_not_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too many symbols for the embedding; and as many as there is room for, but others than the weights know."""
    saved, out = tmp_path / "saved", tmp_path / "run"
    sets = settings(corpus(tmp_path / "text"), model__config='""', model__checkpoint=f'"{saved}"')
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}
    for rows, kind, words in (
        (100, "bytes", ['"bytes"', "257 symbols", str(saved), "100 rows", "Set data.tokenizer"]),
        (257, "bpe", ['"bpe"', str(saved), "tokenizer of its own", "set data.tokenizer"]),
    ):
        model.build(shape, rows, seed=0).save_pretrained(saved)
        refused(["train", "--workers", "4", *flags([*sets, f"data.tokenizer={kind}"]), "--out", str(out)], capsys, *words)
        tokenizer.as_transformers("bytes").save_pretrained(saved)
    assert not out.exists()


def test_a_data_set_without_a_text_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, out = tmp_path / "part-0.parquet", tmp_path / "run"
    for columns, words in (
        ({"id": [1, 2], "body": ["one", "two"]}, ["no column 'text'", "part-0.parquet", "id, body", "Set data.text"]),
        ({"id": [1, 2]}, ["no column 'text'", "part-0.parquet", "id", "text"]),
    ):
        pq.write_table(pa.table(columns), table)
        refused(["train", "--workers", "4", *flags(settings(table)), "--out", str(out)], capsys, *words)
    assert not out.exists()


def test_a_checkpoint_of_another_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a configuration that was changed, and of a run whose checkpoints are another one's."""
    text = corpus(tmp_path / "text")
    runs = [tmp_path / "one", tmp_path / "other"]
    for out, width in zip(runs, (16, 32), strict=True):
        shape = f'{{model_type = "gpt2", n_layer = 1, n_embd = {width}, n_head = 2, n_positions = 64}}'
        more = {"method__name": "diloco", "fleet__name": "uniform-2", "run__rounds": 1, "plan__steps": 1, "checkpoint__every": 1}
        assert main(["simulate", *flags(settings(text, model__config=shape, **more)), "--out", str(out)]) == 0
    run, other = runs
    (run / "summary.json").unlink()  # as if it had been interrupted
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("n_embd = 16", "n_embd = 32"))
    assert (run / "config.toml").read_text() != config
    capsys.readouterr()
    refused(["simulate", "--resume", str(run)], capsys, "the configuration", "has changed since the run began", "put it back")
    (run / "config.toml").write_text(config)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    words = ["checkpoint of round 1", str(run), "another model", "transformer.wte.weight", "(257, 32)", "(257, 16)", "of one run together"]
    refused(["simulate", "--resume", str(run)], capsys, *words)
    refused(["export", str(run), "--to", str(tmp_path / "model")], capsys, *words)
    refused(["eval", str(run), "--limit", "20"], capsys, *words)
    facts = json.loads((run / "facts.json").read_text())
    (run / "facts.json").write_text(json.dumps(facts | {"world": "net"}))
    refused(["train", "--workers", "2", "--resume", str(run)], capsys, *words)


def test_a_run_that_has_trained_nothing_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has its folder, and no checkpoint."""
    run = tmp_path / "run"
    sets = settings(corpus(tmp_path / "text"), method__name="diloco", fleet__name="uniform-2", run__rounds=1, plan__steps=1)
    assert main(["simulate", *flags(sets), "--out", str(run)]) == 0
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    capsys.readouterr()
    words = [str(run), "nothing is trained yet", "checkpoint.every"]
    refused(["eval", str(run)], capsys, *words)
    refused(["export", str(run), "--to", str(tmp_path / "model")], capsys, *words)
    assert not (tmp_path / "model").exists() and not (run / "eval.json").exists()


def test_an_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, out = tmp_path / "empty", tmp_path / "run"
    empty.mkdir()
    refused(["simulate", *flags(settings(empty)), "--out", str(out)], capsys, str(empty))
    refused(["train", "--workers", "4", *flags(settings(empty)), "--out", str(out)], capsys, str(empty))
    assert not out.exists()


def test_a_fleet_with_a_missing_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet, out = tmp_path / "torn.toml", tmp_path / "run"
    fleet.write_text(NO_LINK)
    sets = settings(corpus(tmp_path / "text"), fleet__name=f'"{fleet}"')
    refused(["simulate", *flags(sets), "--out", str(out)], capsys, "no link", "'b'", "'a'")
    assert not out.exists()


def test_a_run_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious.txt").write_text("kept")
    sets = flags(settings(corpus(tmp_path / "text")))
    for command in (["simulate"], ["train", "--workers", "4"]):
        refused([*command, *sets, "--out", str(out)], capsys, str(out), "--out", "--resume")
    refused(["demo", "--out", str(out)], capsys, str(out))
    assert [p.name for p in out.iterdir()] == ["precious.txt"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("simulate", "train"):
        refused([command, "--resume", str(tmp_path)], capsys, "not a run folder")
    refused(["report", str(tmp_path)], capsys, "not a run folder")


def test_workers_must_fit_the_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets, out = flags(settings(corpus(tmp_path / "text"))), str(tmp_path / "run")
    refused(["train", *sets, "--workers", "3", "--out", out], capsys, "--workers 3", "azure-4", "--workers 4")
    refused(["train", *sets, "--out", out], capsys, "--workers 4", "torchrun")

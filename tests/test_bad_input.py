"""Bad input through the command line: exit code 2, a message that names value, expectation and remedy, and nothing created."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import corpus, flags, settings

from gossamer.cli import main

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
    workers = ["--workers", "4"] if command == "train" else []
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

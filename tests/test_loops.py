"""The examples of loops: each trains what `gossamer train` would, to the same bits, with few lines beside the user's own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import gossamer
from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.core.tree import sha256
from gossamer.library import Record
from gossamer.net import launch

ROOT = Path(__file__).resolve().parent.parent
LOOPS = ROOT / "examples" / "loops"
NAMES = ("plain", "titan", "hf_trainer", "lightning_trainer")
HEAVY = ("accelerate", "lightning")
"""What some of them load, and takes its time."""
MARK = "  # +"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, run by two processes."""
    out = tmp_path_factory.mktemp("loops")
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    said: list[str] = []
    command = [sys.executable, "-m", "loop_worker", str(out), *NAMES]
    modules = ("gossamer.app.train", "gossamer.library", *HEAVY)
    code = launch(2, command, out / "logs", env=env, say=said.append, modules=modules)
    assert code == 0, "\n".join(said)
    return out


@pytest.fixture(scope="module")
def reference(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the project's own run of the same ends with."""
    run = simulate(resolve(load([LOOPS / "job.toml"])), tmp_path_factory.mktemp("run") / "reference")
    shas = json.loads((run.path / "summary.json").read_text())["params_sha256"]
    assert len(set(shas)) == 1
    return str(shas[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_ends_with_the_bits_of_the_project_s_run(name: str, trained: Path, reference: str) -> None:
    for worker in range(2):
        params = torch.load(trained / f"{name}-{worker}.pt", weights_only=True)
        assert sha256(params) == reference


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_needs_twenty_lines_at_most(name: str) -> None:
    """Those that are marked; and without them no word of gossamer's is left but in names of files."""
    lines = (LOOPS / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if line.endswith(MARK)]
    assert 3 <= len(marked) <= 20
    own = "\n".join(line for line in lines[4:] if not line.endswith(MARK))
    assert "gossamer" not in own and "outer" not in own.replace("router", "")


@pytest.mark.filterwarnings("ignore")  # of Lightning's, about torch, about loaders of few workers, and about metrics of no logger
def test_lightning_s_losses_and_checkpoints(tmp_path: Path) -> None:
    """It divides the loss of each batch by as many as it accumulates. What was saved without the outer state is not gone on from."""
    import lightning.pytorch as lightning

    from gossamer.integrations.lightning import GossamerCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.weight * batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    records: list[Record] = []
    join = partial(gossamer.join, method="diloco", steps=2, batch=1, sequence=1, rounds=2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    data = torch.utils.data.DataLoader([torch.full((1,), float(k)) for k in range(8)], batch_size=None)

    def train(epochs: int, gossamers: bool = True, start: str | None = None) -> lightning.Trainer:
        records.clear()
        told = GossamerCallback(join, tokens=len, on_record=records.append)
        options = {"accelerator": "cpu", "devices": 1, "max_epochs": epochs, "accumulate_grad_batches": 4, **quiet}
        trainer = lightning.Trainer(callbacks=[told] if gossamers else [], **options)
        trainer.fit(Module(), data, ckpt_path=start)
        return trainer

    for gossamers in (False, True):
        train(1, gossamers).save_checkpoint(tmp_path / f"{gossamers}.ckpt")
    assert records[-1].metrics["loss"] == 3.5 and records[-1].round == 1
    train(2, start=str(tmp_path / "True.ckpt"))
    assert records[-1].over and records[-1].round == 2 and len(records) == 8
    with pytest.raises(gossamer.BadInput, match="which has no outer state"):
        train(2, start=str(tmp_path / "False.ckpt"))


def test_a_checkpoint_in_the_middle_of_a_round_warns_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    from gossamer.integrations.state import outer_state

    class Middle:
        def state_dict(self) -> dict[str, int]:
            raise gossamer.BadInput("in the middle of a round")

    assert outer_state(cast(Any, Middle())) is None
    assert "cannot be gone on from: in the middle of a round" in caplog.text


def test_a_trainer_s_checkpoint_has_the_outer_state_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.integrations import transformers

    class Kept:
        def state_dict(self) -> dict[str, int]:
            return {"round": 3}

    told = transformers.GossamerCallback(lambda model, optimizer: None)  # type: ignore[arg-type, return-value]
    told.outer = Kept()  # type: ignore[assignment]
    args, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=7)
    folder = tmp_path / "checkpoint-7"
    told.on_save(args, state, None)
    assert transformers._kept(folder) == {"round": 3}

    def half(kept: object, path: Path) -> None:
        path.write_bytes(b"PK")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(gossamer.RunFailed, match="no space left"):
        told.on_save(args, state, None)
    assert transformers._kept(folder) == {"round": 3} and len(list(folder.iterdir())) == 1

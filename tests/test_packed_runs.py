"""Runs on documents that are packed as they come: resumed ones end with the bits of those that were not stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import mixture, settings

from gossamer.app import corpora
from gossamer.app.config import dump, load
from gossamer.app.folder import RunFolder
from gossamer.app.grids.cell import cell_hash
from gossamer.app.job import resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.core.errors import BadInput, Stopped
from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def sets(data: Path) -> list[str]:
    """For two workers. Real ones: test_real_processes_end_with_the_bits_of_the_simulation."""
    more = {"fleet__name": '"uniform-2"', "data__valid_documents": 9, "checkpoint__every": 1, "method__name": '"diloco"'}
    return settings(data, data__source="stdlib", data__mix=mixture(data), **more)


@pytest.fixture(scope="module")
def run(sets: list[str], cache: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return simulate(resolve(load([], sets)), tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def ended(folder: RunFolder) -> dict:
    return json.loads((folder.path / "summary.json").read_text())


def test_a_run_goes_on_in_the_middle_of_a_document(run: RunFolder, sets: list[str], tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        seen: list[int] = []
        boundary = SimHooks.boundary

        def stops(self, worker, round, *rest):
            seen.append(round)
            if round == 3:
                raise Stopped("here")
            return boundary(self, worker, round, *rest)

        patch.setattr(SimHooks, "boundary", stops)
        with pytest.raises(Stopped):
            simulate(resolve(load([], sets)), tmp_path / "cut", quiet=True)
    cut = RunFolder.existing(tmp_path / "cut")
    assert checkpoint.latest(cut.checkpoints) == 2
    body = checkpoint.read_part(cut.checkpoints, 2, 1).body
    places = json.loads(body["data"])["places"]
    assert body["cursor"] == 8 and sum(place[-1] for place in places) == 8 and any(place[4] for place in places)
    simulate(resolve(load([cut.path / "config.toml"])), resume=cut, quiet=True)
    assert ended(cut)["params_sha256"] == ended(run)["params_sha256"]
    assert ended(cut)["final_loss"] == ended(run)["final_loss"]
    assert run.facts()["train_tokens"] is None, "nobody has counted them"


def test_a_configuration_comes_back_and_what_differs_is_another_cell(sets: list[str], tmp_path: Path) -> None:
    config = load([], sets)
    (tmp_path / "all.toml").write_text(dump(config))
    assert load([tmp_path / "all.toml"]) == config and hash(config.data) == hash(load([tmp_path / "all.toml"]).data)
    marks = {cell_hash(resolve(load([], [*sets, more]))) for more in ("seed=0", "data.shuffle=0", "data.valid_documents=8")}
    assert len(marks) == 3


@pytest.mark.parametrize(
    ("setting", "packed"),
    [
        ("data.source=stdlib", False),
        ("data.source={text}", False),
        ("data.source={data}/parquet", True),
        ("data.source={data}/lines.jsonl", False),
        ("data.source={data}/lines.jsonl;data.text=body", True),
        ("data.source=allenai/c4", True),
        ("data.source=no/such/folder", False),
        ("data.source=stdlib;data.loader=packed", True),
    ],
)
def test_the_loader_is_found(setting: str, packed: bool, data: Path, sets: list[str], text: Path) -> None:
    said = setting.format(data=data, text=text).split(";")
    assert corpora.packed(load([], said).data) is packed


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.mix=[{source='a', wieght=1}]", "unknown key wieght; did you mean weight?"),
        ("data.mix=[{source='a'}]", "source 1 has no weight"),
        ("data.mix=[{source='a', weight=0}]", "expected a number above 0"),
        ("data.mix=[{source=3, weight=1}]", "source = 3: expected text"),
        ("data.mix=['a']", "expected a table"),
        ("data.mix=a", 'data.mix = "a": expected a list'),
        ("data.mix=[{source='a', weight=1}];data.source=b", "both say where the data are"),
        ("data.loader=windows;data.text=body", 'data.text is for documents that are packed, and data.loader = "windows"'),
    ],
)
def test_refusals_of_settings(setting: str, words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        load([], setting.split(";"))

"""Runs on documents that are packed as they come: simulated, real and resumed ones end with the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import WORDS, settings

from gossamer.app import corpora
from gossamer.app.cells import cell_hash
from gossamer.app.config import dump, load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import SimHooks, simulate
from gossamer.app.train import launch_local
from gossamer.core.errors import BadInput, Stopped
from gossamer.train import checkpoint

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two parquet files, and one of JSON lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    (root / "parquet").mkdir()
    for k in range(2):
        texts = [" ".join(WORDS[(k + i * j + j * j) % len(WORDS)] for j in range(3 + i % 17)) for i in range(150)]
        pq.write_table(pa.table({"content": texts}), root / "parquet" / f"part-{k}.parquet")
    lines = [json.dumps({"text": " ".join(WORDS[i % 7 :]), "n": i}) for i in range(150)]
    (root / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def sets(data: Path) -> list[str]:
    """A mixture of both, for two workers."""
    mix = f'[{{source = "{data}/parquet", text = "content", weight = 2}}, {{source = "{data}/lines.jsonl", weight = 1}}]'
    more = {"fleet__name": '"uniform-2"', "data__mix": mix, "data__valid_documents": 9, "checkpoint__every": 1, "method__name": '"diloco"'}
    return [s for s in settings(data, **more) if not s.startswith("data.source")]


@pytest.fixture(scope="module")
def run(sets: list[str], cache: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return simulate(resolve(load([], sets)), tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def ended(folder: RunFolder) -> dict:
    return json.loads((folder.path / "summary.json").read_text())


def test_a_real_run_ends_with_the_bits_of_the_simulation(run: RunFolder, sets: list[str], tmp_path: Path) -> None:
    real = RunFolder(launch_local(resolve(load([], sets)), tmp_path / "real"))
    assert ended(real)["params_sha256"] == ended(run)["params_sha256"] and ended(real)["final_loss"] == ended(run)["final_loss"]
    assert real.facts()["corpus_sha256"] == run.facts()["corpus_sha256"] and run.facts()["train_tokens"] is None


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
def test_the_loader_is_found(setting: str, packed: bool, data: Path, text: Path) -> None:
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

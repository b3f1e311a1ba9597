"""Data sets by name, streamed from a hub that the test serves: the libraries' own code, over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from toy_hub import COMMIT, serving

from gossamer.train import prepared
from gossamer.train.documents import Source

HERE = Path(__file__).parent
CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: data/en/part-*.parquet
- config_name: de
  data_files: data/de/part-*.parquet
---
"""


def test_a_data_set_is_streamed_by_its_name(cache: None, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in ("en/part-0", "en/part-1", "en/part-2", "de/part-0"):
        path = tmp_path / "hub" / "data" / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": list(range(60)), "content": [f"{part} {i} " + "word " * (i % 9) for i in range(60)]}), path)
    (tmp_path / "hub" / "README.md").write_text(CARD)
    with serving(tmp_path / "hub", "some/thing") as (address, asked):
        home = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        paths = {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
        done = subprocess.run(
            [sys.executable, "-m", "by_name", "some/thing"], env=os.environ | home | paths, capture_output=True, text=True, timeout=110
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["name"] == f"some/thing/en@{COMMIT[:12]}"
    assert {path.rpartition("/")[0] for path in asked if path.startswith("data/")} == {"data/en"}
    # the same files here give the same sequences, under another mark
    local = prepared.load(
        [Source(str(tmp_path / "hub" / "data" / "en"), text="content")], sequence=16, tokenizer="bytes", valid_documents=8
    )
    assert found["first"] == [local.batches(16, 0, worker, 2).batch(0, 20).tolist() for worker in (0, 1)]
    assert found["next"][0] == found["next"][1] and found["sha"] != local.content_hash
    no_subset, other_subset, column, nothing = found["refused"]
    assert "'en', 'de'" in no_subset and "'en', 'de'" in other_subset and "data.subset" in no_subset
    assert "no column 'text', but: n, content" in column
    assert "no data set that the hub shows" in nothing

"""What a report says of sites that were not there for some rounds: what the records know, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_folders import make_run, read_lines, write_lines

from gossamer.report.page import tiles
from gossamer.report.read import Run
from gossamer.report.words import alarms

MISSING = "some records are missing"


def wide(folder: Path, keep: dict[int, set[int]], members: dict[int, list[int]], **change: Any) -> Run:
    """A wide-area run of ten rounds, with the records of these rounds alone of some workers, and who was left out after which round."""
    made = make_run(folder, method="diloco", rounds=10, change={"world": "wan", "dead": [], **change})
    records = [r | {"round": r["round"] + 1} if r["kind"] == "round" else r for r in read_lines(made / "metrics.jsonl")]
    kept = [r for r in records if r["kind"] != "round" or r["round"] in keep.get(r["worker"], set(range(1, 11)))]
    told = [{"kind": "members", "round": at, "worker": 1, "absent": absent, "session": 2} for at, absent in members.items()]
    write_lines(made / "metrics.jsonl", [*kept, *told])
    return Run.load(made)


def notes(run: Run) -> tuple[bool, bool]:
    """Whether records are said to be missing beside the total time, and beside the tokens."""
    found = {tile.name: MISSING in tile.unit for tile in tiles(run)}
    return found["total time"], found["tokens"]


@pytest.mark.parametrize(
    ("keep", "members", "said", "missing"),
    [
        ({1, 2, 3, 8, 9, 10}, {3: [0], 7: []}, "worker 0 was away from round 4 on and back in round 8.", False),
        ({1, 2, 8, 9, 10}, {4: [0], 7: []}, "away from round 5 on (its records of rounds 3 to 4 are lost) and back in round 8.", True),
        ({1, 2, 8, 9, 10}, {}, "worker 0 has no records of rounds 3 to 7, and was there in round 8.", True),
    ],
)
def test_a_site_that_came_back_was_away_and_may_have_lost_records(
    tmp_path: Path, keep: set[int], members: dict[int, list[int]], said: str, missing: bool
) -> None:
    run = wide(tmp_path / "a", {0: keep}, members)
    (sentence,) = alarms([run])
    assert sentence.endswith(said) and "died" not in sentence
    assert notes(run) == (False, missing), "the other workers have all of their time"


def test_a_site_that_is_gone_at_the_end_is_not_said_to_have_died(tmp_path: Path) -> None:
    gone = {"dead": [2], "without_records": [2]}
    run = wide(tmp_path / "a", {2: set()}, {2: [2], 4: [], 6: [2]}, **gone)
    (sentence,) = alarms([run])
    assert "worker 2 was away from round 7 on, and the others went on: the final model is their mean; records of those" in sentence
    assert notes(run) == (False, True)
    run = wide(tmp_path / "b", {2: set()}, {}, **gone)
    assert "worker 2 was not there at the end, and the others went on" in alarms([run])[0]
    names = [f"site {name}" for name in ("lyon", "oslo", "porto", "riga")]
    run = wide(tmp_path / "d", {0: {1, 2, 3, 8, 9, 10}, 2: set()}, {3: [0], 7: [2]}, worker_names=names, **gone)
    (away, back) = alarms([run])
    assert "site porto was away from round 8 on, and" in away and back.endswith("site lyon was away from round 4 on and back in round 8.")
    run = wide(tmp_path / "c", {i: {1, 2, 9, 10} for i in range(4)}, {})
    assert notes(run) == (True, True), "nobody has all of its time"
    path = run.folder / "metrics.jsonl"
    write_lines(path, [r for r in read_lines(path) if r["worker"] == 0])
    assert notes(Run.load(run.folder)) == (False, True), "a site that knows its own records alone does not know the time of others"


def test_elsewhere_the_records_know_of_a_death(tmp_path: Path) -> None:
    run = wide(tmp_path / "a", {0: {1, 2, 8, 9, 10}, 1: {1, 2, 3}}, {2: [0]}, world="net", dead=[1])
    assert [sentence.partition(": ")[2] for sentence in alarms([run])] == [
        "worker 1 died after round 3, and the others went on: the final model is their mean.",
        "worker 0 died after round 2 and was back in round 8, with the state of another.",
    ]
    assert notes(run) == (False, False)

"""Profiles: memory lines and the largest batch, links measured over the transport, and the command from end to end."""

from __future__ import annotations

import io
import math
import tomllib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from hypothesis import given
from hypothesis import strategies as st
from net_toys import in_threads
from rich.console import Console

from gossamer.app import fleets
from gossamer.app.planning import memory, profile
from gossamer.app.planning.measure import UNEVEN, Measured, Point, _doubling, _expected_gb, _knee_passed, _still_rising, spread_of
from gossamer.cli import main
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Gpu, Site
from gossamer.core.fleet_parse import parse_fleet
from gossamer.net.probe import LinkMeasure, measure_links, schedule

CARD = Gpu("card", tflops=1.0, memory_gb=24.0)
SITE = Site("a", "x", CARD, up_mbps=1.0, down_mbps=1.0)
PLAIN = {"name": "f", "sites": [{"name": "a", "region": "x", "gpu": "A100 80GB", "up_mbps": 1, "down_mbps": 1}]}


def parsed(**changes: Any) -> Site:
    return parse_fleet({**PLAIN, "sites": [{**PLAIN["sites"][0], **changes}]}, fleets.gpus()).sites[0]  # type: ignore[dict-item]


# ---- memory of a site


@given(st.floats(0.01, 100.0), st.floats(1e-6, 1e-2), st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True))
def test_the_line_through_points_of_a_line_is_that_line(fixed_gb: float, token_gb: float, tokens: list[int]) -> None:
    site = replace(SITE, memory_gb=tuple((t, fixed_gb + token_gb * t) for t in sorted(tokens)))
    found_fixed, found_token = site.memory_line()
    for t in tokens:
        assert found_fixed + found_token * t == pytest.approx(fixed_gb + token_gb * t, rel=1e-9)


def test_the_line_is_the_best_one() -> None:
    points = ((100, 1.0), (200, 1.5), (400, 2.2), (800, 4.5))
    fixed_gb, token_gb = replace(SITE, memory_gb=points).memory_line()

    def squares(fixed: float, token: float) -> float:
        return sum((fixed + token * t - gb) ** 2 for t, gb in points)

    best = squares(fixed_gb, token_gb)
    assert all(squares(fixed_gb + a, token_gb * b) > best for a in (-0.01, 0.0, 0.01) for b in (0.99, 1.0, 1.01) if (a, b) != (0.0, 1.0))


@given(st.floats(0.1, 30.0), st.floats(1e-6, 1e-2), st.integers(1, 4096), st.floats(0.0, 0.9), st.one_of(st.none(), st.floats(0.5, 1000.0)))
def test_the_largest_batch_fits_and_the_next_does_not(
    fixed_gb: float, token_gb: float, sequence: int, headroom: float, limit_gb: float | None
) -> None:
    site = replace(SITE, memory_gb=((1000, fixed_gb + 1000 * token_gb), (3000, fixed_gb + 3000 * token_gb)), memory_limit_gb=limit_gb)
    most = site.batch_max(sequence, headroom)
    fixed, token = site.memory_line()
    free = (1 - headroom) * (24.0 if limit_gb is None else limit_gb)
    assert most is not None
    assert most == 0 or fixed + token * (most * sequence) <= free
    assert fixed + token * ((most + 1) * sequence) > free
    real = (Fraction(free) - Fraction(fixed)) / (Fraction(token) * sequence)
    assert abs(most - max(0, math.floor(real))) <= 1


def test_what_is_not_known_limits_nothing() -> None:
    assert SITE.batch_max(128) is None
    with pytest.raises(BadInput, match="gossamer profile"):
        SITE.memory_line()
    flat = replace(SITE, memory_gb=((128, 2.0), (1024, 1.8)))  # noise: it does not fall with tokens
    assert flat.memory_line() == (pytest.approx(1.9), 0.0)
    assert (flat.batch_max(128), flat.batch_max(4096)) == (8, 1)  # no larger than was measured
    assert replace(flat, memory_limit_gb=1.0).batch_max(128) == 0
    for bad in ({"sequence": 0}, {"sequence": 1, "headroom": 1.0}, {"sequence": 1, "headroom": -0.1}):
        with pytest.raises(BadInput, match="headroom"):
            flat.batch_max(**bad)  # type: ignore[arg-type]


def test_more_headroom_a_lower_limit_and_a_longer_sequence_never_give_a_larger_batch() -> None:
    site = replace(SITE, memory_gb=((128, 1.0), (1024, 3.0)))
    found = [site.batch_max(128, headroom) for headroom in (0.0, 0.1, 0.5, 0.9)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]  # type: ignore[type-var, operator]
    assert site.batch_max(256, 0.0) == found[0] // 2  # type: ignore[operator]
    assert replace(site, memory_limit_gb=12.0).batch_max(128, 0.0) == replace(site, gpu=replace(CARD, memory_gb=12.0)).batch_max(128, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_gb": [[128, 1.0]]}, "one point"),
        ({"memory_gb": [[128, 1.0], [128, 2.0]]}, "tokens rising"),
        ({"memory_gb": [[128, 1.0], [256, 0]]}, "above 0"),
        ({"memory_gb": [[128, 1.0], [256]]}, "tokens of a step, GB"),
        ({"memory_gb": [[128, 1.0], [256.5, 2.0]]}, "whole number"),
        ({"memory_gb": 3}, "square brackets"),
        ({"memory_limit_gb": 0}, "memory_limit_gb"),
        ({"memory_limit_gb": "24"}, "expected a number"),
        ({"memory_gbs": []}, "did you mean 'memory_gb'"),
    ],
)
def test_bad_memory_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parsed(**changes)


def test_memory_is_read_and_is_absent_where_it_is_not_given() -> None:
    site = parsed(memory_gb=[[128, 1], [256, 1.5]], memory_limit_gb=10)
    assert (site.memory_gb, site.memory_limit_gb, site.limit_gb) == (((128, 1.0), (256, 1.5)), 10.0, 10.0)
    assert (parsed().memory_gb, parsed().memory_limit_gb, parsed().limit_gb) == ((), None, 80.0)


# ---- measuring


def test_batches_double_until_tokens_a_second_stop_rising() -> None:
    def batches(rate: Any, sequence: int) -> list[int]:
        points: list[Point] = []
        for batch in _doubling(points, sequence):
            points.append(Point(batch, batch * sequence, batch * sequence / rate(batch), 1.0))
        return [p.batch for p in points]

    assert batches(lambda batch: batch, 128) == [2**k for k in range(10)]  # 65,536 tokens
    assert batches(lambda batch: min(batch, 4), 128) == [1, 2, 4, 8, 16]  # two doublings without gain
    assert batches(lambda batch: 1, 2**20) == [1, 2]


def of_rates(*rates: float) -> tuple[Point, ...]:
    return tuple(Point(2**k, 2**k, 2**k / rate, 1.0) for k, rate in enumerate(rates))


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=8))
def test_tokens_a_second_have_not_stopped_rising_and_still_risen(rates: list[float]) -> None:
    points = of_rates(*rates)
    assert not (_knee_passed(points) and _still_rising(points))


def test_what_still_rises_is_beyond_all_before() -> None:
    assert _still_rising(of_rates(10.0, 20.0))
    assert not _still_rising(of_rates(10.0, 20.0, 15.0, 20.0))  # a dip between
    assert not _still_rising(of_rates(10.0))


def test_measurements_that_something_disturbed_are_pointed_out() -> None:
    assert Measured(of_rates(10.0, 5.0, 11.0, 10.5), None, "").disturbed == (2,)  # a dip
    assert Measured(of_rates(10.0, 20.0, 19.5, 21.0, 12.0), None, "").disturbed == ()  # what is past the knee may fall
    uneven = [0.1, 0.1, 0.2, 0.3, 0.3]
    assert spread_of(uneven) > UNEVEN > spread_of([0.1] * 9 + [9.0])  # one slow step is no matter to a median
    one = replace(
        worker("a"), measured=Measured((replace(of_rates(10.0)[0], spread=spread_of(uneven)), *of_rates(1.0, 20.0)[1:]), None, "x")
    )
    assert profile.WorkerProfile.of_json(profile.json.dumps(profile.asdict(one)).encode()) == one
    shown = io.StringIO()
    profile.show(Console(file=shown, width=200), [one], [])
    assert shown.getvalue().count("disturbed") == 2 and "Measure again" in shown.getvalue()
    shown.truncate(0)
    profile.show(Console(file=shown, width=200), [worker("a")], [])
    assert "disturbed" not in shown.getvalue()


def test_the_next_batch_is_foreseen_by_the_last_two() -> None:
    points = [Point(1, 100, 1.0, 3.0), Point(2, 200, 1.0, 4.0)]
    assert _expected_gb([], 2.0, 100) == 2.0
    assert _expected_gb(points[:1], 2.0, 200) == 4.0
    assert _expected_gb(points, 2.0, 400) == 6.0


def test_a_process_of_its_own_has_a_peak_of_its_own() -> None:
    assert memory.peak_in_child_gb(np.ones, 50_000_000) > 0.4


@pytest.mark.skipif(not memory.can_reset(), reason="this system does not forget peaks")
def test_a_peak_is_forgotten_on_request() -> None:
    cpu = profile.torch.device("cpu")
    memory.reset_peak(cpu)
    before_gb = memory.used_gb(cpu)
    np.ones(50_000_000)
    assert 0.38 < memory.peak_gb(cpu) - before_gb < 0.6
    memory.reset_peak(cpu)
    assert memory.peak_gb(cpu) - before_gb < 0.2


def test_every_directed_pair_is_measured_once_and_never_two_at_a_time() -> None:
    for n in (1, 2, 5):
        assert sorted(schedule(n)) == [(i, j) for i in range(n) for j in range(n) if i != j]
    links = in_threads(3, lambda group: measure_links(group, most_bytes=100_000))
    assert [[(link.frm, link.to) for link in mine] for mine in links] == [[(0, 1), (0, 2)], [(1, 0), (1, 2)], [(2, 0), (2, 1)]]
    assert all(link.rate_mbps > 0 and link.rtt_ms > 0 and link.probe_bytes == 100_000 for mine in links for link in mine)


# ---- the file


def worker(name: str, gpu: str = 'a "card"', tflops: float = 0.123456789, limit_gb: float | None = None) -> profile.WorkerProfile:
    points = tuple(Point(b, 64 * b, 0.01 + b / 300, 0.5 + b / 7000) for b in (1, 2, 4))
    return profile.WorkerProfile(name, gpu, tflops, 25.0, limit_gb, Measured(points, None, "that is all"))


def test_a_written_profile_loads_with_the_same_points(tmp_path: Path) -> None:
    links = [LinkMeasure(0, 1, 912.3456789, 12.3456789, 10**6), LinkMeasure(1, 0, 45.6, 1e-3, 10**6)]
    data = profile.fleet_data("two", "here", [worker("a", limit_gb=3.0), worker("b", tflops=0.2)], links)
    assert tomllib.loads(profile.fleet_text(data)) == data
    path = tmp_path / "two.toml"
    path.write_text(profile.fleet_text(data))
    fleet = fleets.load(path)
    assert fleet == parse_fleet(data, {})
    a, b = fleet.sites
    for site in (a, b):
        assert [t for t, _ in site.step_s] == [t for t, _ in site.memory_gb] == [64, 128, 256]
        assert [s for _, s in site.step_s] == pytest.approx([0.01 + k / 300 for k in (1, 2, 4)], rel=1e-5)
        assert [gb for _, gb in site.memory_gb] == pytest.approx([0.5 + k / 7000 for k in (1, 2, 4)], rel=1e-5)
    assert (a.gpu.tflops, a.limit_gb, b.limit_gb, a.up_mbps, a.down_mbps) == (0.2, 3.0, 25.0, 912.346, 45.6)
    assert (fleet.link(0, 1).rate_mbps, fleet.link(0, 1).latency_ms, fleet.link(1, 0).rate_mbps) == (912.346, 6.17285, 45.6)


def test_what_goes_to_worker_0_comes_back() -> None:
    one = replace(worker("a"), measured=Measured(worker("a").measured.points[:1], (32, 0.4), "x"))
    assert profile.WorkerProfile.of_json(profile.json.dumps(profile.asdict(one)).encode()) == one
    assert one.measured.memory_gb == ((32, 0.4), (64, 0.5 + 1 / 7000))


def test_the_knee_is_the_smallest_batch_near_the_best() -> None:
    points = tuple(Point(b, b, b / rate, 1.0) for b, rate in ((1, 50.0), (2, 94.0), (4, 96.0), (8, 100.0), (16, 90.0)))
    assert Measured(points, None, "").knee == 4


# ---- the command


def test_two_processes_are_profiled_into_a_fleet_that_plans_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = small_runs.flags(small_runs.settings(small_runs.corpus(tmp_path / "text"), plan__batch=1))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.chdir(tmp_path)
    here = ["--set", "fleet.name=two.toml", *sets]  # not there yet: the workers are alike
    whole = ["--set", "plan.micro_batch=1", "--set", "clock.pace_s=60"]  # ignored
    assert main(["profile", *here, *whole, "--workers", "2", "--batches", "1,2,3", "--steps", "1", "--out", "two.toml"]) == 0
    said = capfd.readouterr().out
    assert "knee" in said and "worker-1" in said and "two.toml" in said
    fleet = fleets.load(tmp_path / "two.toml")
    assert [(s.name, s.region, s.workers) for s in fleet.sites] == [("worker-0", "worker-0", 1), ("worker-1", "worker-1", 1)]
    assert fleet.source.startswith("measured by gossamer profile on ")
    for site in fleet.sites:
        assert [t for t, _ in site.step_s] == [t for t, _ in site.memory_gb] == [16, 32, 48]
        assert min(s for _, s in site.step_s) > 0 and min(gb for _, gb in site.memory_gb) > 0.05
        assert site.gpu.name.startswith("CPU ") and site.limit_gb == pytest.approx(site.gpu.memory_gb / 2, rel=1e-5)
        assert 0 < site.up_mbps < math.inf and 0 < site.down_mbps < math.inf
    assert sorted(fleet.links) == [("worker-0", "worker-1"), ("worker-1", "worker-0")]
    assert all(link.rate_mbps > 0 and link.latency_ms > 0 for link in fleet.links.values())
    assert main(["plan", *here]) == 0
    assert "worker-1" in capfd.readouterr().out


def test_one_worker_is_a_fleet_of_one_and_a_profile_may_be_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sets = small_runs.flags(small_runs.settings(small_runs.corpus(tmp_path / "text")))
    out = tmp_path / "one.toml"
    for batches in ("1,2", "2,4"):
        assert main(["profile", *sets, "--batches", batches, "--steps", "1", "--memory-limit-gb", "900", "--out", str(out)]) == 0
    fleet = fleets.load(out)
    assert (fleet.n, fleet.links, fleet.site(0).up_mbps, fleet.site(0).limit_gb) == (1, {}, math.inf, 900.0)
    assert [t for t, _ in fleet.site(0).step_s] == [32, 64]
    assert main(["plan", *sets, "--set", f"fleet.name={out}"]) == 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    capfd.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batches", "4,2"], "--batches '4,2': expected two or more whole numbers"),
        (["--batches", "4"], "expected two or more"),
        (["--batches", "0,1"], "expected two or more"),
        (["--batches", "a,b"], "expected two or more"),
        (["--memory-limit-gb", "0"], "--memory-limit-gb 0.0: expected a number of GB above 0"),
        (["--memory-limit-gb", "nan"], "expected a number of GB above 0"),
        (["--memory-limit-gb", "0.001"], "GB are taken before the first step"),
        (["--out", "profile.txt"], "ends in .toml"),
        (["--out", "missing/profile.toml"], "cannot be written"),
        (["--out", "taken.toml"], "is no profile"),
        (["--out", "folder.toml"], "cannot be written"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = small_runs.flags(small_runs.settings(small_runs.corpus(tmp_path / "text")))
    (tmp_path / "taken.toml").write_text("name = 'mine'\n")
    (tmp_path / "folder.toml").mkdir()
    before = sorted(tmp_path.iterdir())
    assert main(["profile", *sets, *arguments]) == 2
    assert words in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "taken.toml").read_text() == "name = 'mine'\n"

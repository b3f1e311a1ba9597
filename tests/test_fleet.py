"""Fleets: seats, links, step times, what is refused, and the built-in ones."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.app.fleets import gpus, load, presets
from gossamer.core.errors import BadInput
from gossamer.core.fleet import LAN, Fleet, Gpu, Link, Site
from gossamer.core.fleet_parse import parse_fleet
from gossamer.core.trace import Trace

CARD = Gpu("card", tflops=100.0, memory_gb=24.0)
WIRE = Link(rate_mbps=1000.0, latency_ms=10.0)


def site(name: str, region: str, workers: int = 1, **changes: Any) -> Site:
    return replace(Site(name, region, CARD, up_mbps=100.0, down_mbps=200.0, workers=workers, mfu=0.5), **changes)


def plain(**changes: Any) -> dict[str, Any]:
    """A small fleet as plain dicts."""
    ends = [{"name": n, "region": r, "gpu": "A100 80GB", "up_mbps": 10, "down_mbps": 20} for n, r in (("a", "x"), ("b", "y"))]
    return {"name": "f", "sites": ends, "links": [{"between": ["x", "y"], "rate_mbps": 100, "rtt_ms": 30}], **changes}


def test_seats_count_the_sites_in_order() -> None:
    fleet = Fleet("f", (site("a", "x", 3), site("b", "x"), site("c", "y", 2)), dict.fromkeys([("x", "x"), ("x", "y"), ("y", "x")], WIRE))
    assert [(fleet.site(i).name, fleet.rank(i)) for i in range(fleet.n)] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    for outside in (-1, 6):
        with pytest.raises(BadInput, match="0 to 5"):
            fleet.site(outside)


def test_the_most_exact_link_wins_and_a_site_is_joined_by_its_local_link() -> None:
    links = {
        key: Link(rate_mbps=rate, latency_ms=1.0)
        for key, rate in ((("x", "x"), 1.0), (("x", "y"), 2.0), (("y", "x"), 3.0), (("a", "y"), 4.0), (("x", "c"), 5.0), (("a", "c"), 6.0))
    }
    fleet = Fleet("f", (site("a", "x"), site("b", "x", 2), site("c", "y"), site("d", "y"), site("e", "x")), links | {("y", "y"): WIRE})
    a, b, b2, c, d, e = range(6)
    rates = {(i, j): fleet.link(i, j).rate_mbps for i in range(6) for j in range(6) if i != j}
    assert rates[a, b] == rates[b, a] == rates[e, b] == 1.0
    assert rates[b, d] == 2.0 and rates[d, b] == rates[c, a] == 3.0
    assert rates[a, d] == 4.0 and rates[b, c] == 5.0 and rates[a, c] == 6.0
    assert fleet.link(b, b2) == LAN and fleet.link(c, d) == WIRE
    by_place: dict[tuple[int, int], Link] = {}
    for i, j in rates:  # place(i), place(j) decide the link
        assert by_place.setdefault((fleet.place(i), fleet.place(j)), fleet.link(i, j)) == fleet.link(i, j)


def test_a_large_fleet_holds_nothing_square() -> None:
    fleet = Fleet("f", tuple(site(f"s{k}", "x") for k in range(10_000)), {("x", "x"): WIRE})
    assert fleet.n == 10_000 and fleet.link(0, 9_999) == WIRE
    assert len(pickle.dumps(fleet)) < 100 * fleet.n


def test_a_missing_link_names_the_pair_and_the_remedy() -> None:
    with pytest.raises(BadInput, match=r"from site 'b' \(region 'y'\) to site 'a' \(region 'x'\).*from = 'y', to = 'x'"):
        Fleet("f", (site("a", "x"), site("b", "y")), {("x", "y"): WIRE})
    with pytest.raises(BadInput, match=r"from site 'a' .* to site 'b'"):
        Fleet("f", (site("a", "x"), site("b", "x")), {})
    assert Fleet("f", (site("a", "x", 4),), {}).link(0, 3) == LAN


def test_names_must_be_clear() -> None:
    with pytest.raises(BadInput, match="two sites named 'a'"):
        Fleet("f", (site("a", "x"), site("a", "x")), {("x", "x"): WIRE})
    with pytest.raises(BadInput, match="name of another region"):
        Fleet("f", (site("y", "x"), site("b", "y")), {("x", "y"): WIRE, ("y", "x"): WIRE})
    with pytest.raises(BadInput, match="'z', which is no site or region"):
        Fleet("f", (site("a", "x"),), {("x", "z"): WIRE})
    with pytest.raises(BadInput, match="no sites"):
        Fleet("f", (), {})


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (WIRE, "rate_mbps", 0.0), (WIRE, "rate_mbps", math.inf), (WIRE, "rate_mbps", math.nan), (WIRE, "latency_ms", -1.0),
        (WIRE, "jitter_ms", -0.1), (WIRE, "loss", 1.0), (WIRE, "loss", -0.1), (WIRE, "window_bytes", 10), (WIRE, "connections", 0),
        (site("a", "x"), "workers", 0), (site("a", "x"), "mfu", 0.0), (site("a", "x"), "mfu", 1.5), (site("a", "x"), "up_mbps", 0.0),
        (site("a", "x"), "down_mbps", -1.0), (site("a", "x"), "overhead_s", -1.0), (site("a", "x"), "speed", 0.0),
        (site("a", "x"), "step_s", ((2, 1.0), (1, 2.0))), (CARD, "tflops", 0.0), (CARD, "memory_gb", -1.0),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(make: Any, field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=field):
        replace(make, **{field: value})


def test_one_flow_is_limited_by_window_and_loss() -> None:
    slow = Link(rate_mbps=1000.0, latency_ms=50.0, window_bytes=1_250_000)
    assert slow.flow_mbps == pytest.approx(100.0)  # 1.25 MB each 0.1 s
    assert replace(slow, connections=4).flow_mbps == pytest.approx(400.0)
    assert replace(slow, connections=40).flow_mbps == 1000.0
    lossy = Link(rate_mbps=1000.0, latency_ms=50.0, loss=0.0015)
    assert lossy.flow_mbps == pytest.approx(1460 * 8e-6 / (0.1 * math.sqrt(0.001)))
    assert replace(lossy, loss=0.006).flow_mbps == pytest.approx(lossy.flow_mbps / 2)
    assert replace(lossy, latency_ms=0.0).flow_mbps == 1000.0


def test_step_time_is_overhead_plus_work_over_reached_peak() -> None:
    fleet = Fleet("f", (site("a", "x", overhead_s=0.25), site("b", "x", speed=0.5)), {("x", "x"): WIRE})
    assert fleet.step_s(0, batch=4, sequence=250, flops_per_token=5e10) == pytest.approx(0.25 + 1.0)
    assert fleet.step_s(1, batch=4, sequence=250, flops_per_token=5e10) == pytest.approx(2.0)
    assert fleet.speeds([4, 8], 250, 5e10) == pytest.approx([0.8, 0.25])
    with pytest.raises(BadInput, match="2 workers"):
        fleet.speeds([4], 250, 5e10)


def test_a_measured_profile_replaces_the_formula() -> None:
    measured = site("a", "x", step_s=((100, 1.0), (200, 1.5), (400, 3.5)))
    times = {100: 1.0, 150: 1.25, 200: 1.5, 300: 2.5, 400: 3.5, 500: 4.5, 50: 0.75}
    assert {t: measured.time_s(t, 1e12) for t in times} == pytest.approx(times)
    assert site("a", "x", step_s=((100, 1.0),)).time_s(300, 1e12) == pytest.approx(3.0)
    with pytest.raises(BadInput, match="speed"):
        replace(measured, speed=0.5)


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 3.0)), min_size=1, max_size=6),
    st.floats(0.1, 5.0), st.floats(0.0, 40.0), st.floats(0.0, 40.0), st.floats(0.0, 40.0),
)  # fmt: skip
def test_a_trace_serves_work_piece_by_piece(pieces: list[tuple[float, float]], last: float, start: float, one: float, two: float) -> None:
    times = [0.0]
    for gap, _ in pieces:
        times.append(times[-1] + gap)
    trace = Trace(tuple(times), (*(f for _, f in pieces), last))
    middle = trace.finish(start, one)
    assert trace.finish(middle, two) == pytest.approx(trace.finish(start, one + two), abs=1e-6) or trace.factor(middle) == 0
    marks = sorted({start, middle, *(t for t in times if start < t < middle)})
    assert sum(trace.factor(a) * (b - a) for a, b in pairwise(marks)) == pytest.approx(one, abs=1e-9)


def test_parsing_reads_both_directions_and_halves_the_round_trip() -> None:
    fleet = parse_fleet(plain(message_ms=2, local={"rate_mbps": 5, "latency_ms": 1}), gpus())
    assert fleet.link(0, 1) == fleet.link(1, 0) == Link(rate_mbps=100.0, latency_ms=15.0)
    assert fleet.message_s == pytest.approx(0.002) and fleet.local.rate_mbps == 5.0
    trace = {"times_s": [0, 60], "factors": [1, 0.5]}
    own = plain(gpus={"My card": {"tflops": 1, "memory_gb": 2}})
    own["sites"][0] |= {"gpu": "My card", "trace": trace, "step_s": [[100, 0.5]], "workers": 2}
    own["links"] = [{"from": "x", "to": "y", "rate_mbps": 1, "latency_ms": 2}, {"from": "y", "to": "x", "rate_mbps": 3, "latency_ms": 4}]
    fleet = parse_fleet(own, gpus())
    assert fleet.n == 3 and fleet.site(0).trace == Trace((0.0, 60.0), (1.0, 0.5)) and fleet.site(0).gpu.memory_gb == 2.0
    assert (fleet.link(0, 2).latency_ms, fleet.link(2, 0).latency_ms) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("top", {"linkz": []}, "'linkz'; did you mean 'links'"),
        ("site", {"up_mpbs": 1}, "'up_mpbs'; did you mean 'up_mbps'"),
        ("link", {"latency": 1}, "'latency'; did you mean 'latency_ms'"),
        ("site", {"gpu": "A100 80gb"}, "did you mean 'A100 80GB'"),
        ("site", {"up_mbps": "fast"}, "up_mbps of site 'a' is 'fast': expected a number"),
        ("site", {"workers": 1.5}, "workers of site 'a' is 1.5: expected a whole number"),
        ("site", {"name": ""}, "expected a text"),
        ("site", {"step_s": [[1]]}, r"expected \[tokens of a step, seconds\]"),
        ("link", {"latency_ms": 1}, "exactly one of latency_ms"),
        ("link", {"from": "x"}, "either between"),
        ("link", {"between": ["x"]}, "two names"),
        ("link", {"loss": 2}, "'x' -> 'y': loss of a link is 2.0"),
        ("top", {"links": [plain()["links"][0]] * 2}, "a second time"),
        ("top", {"sites": 3}, "expected a list"),
        ("top", {"links": []}, "no link from site 'a'"),
    ],
)
def test_parsing_refuses_by_name(where: str, change: dict[str, Any], message: str) -> None:
    data = plain()
    {"top": data, "site": data["sites"][0], "link": data["links"][0]}[where].update(change)
    with pytest.raises(BadInput, match=message):
        parse_fleet(data, gpus())


def test_a_missing_key_is_named() -> None:
    data = plain()
    del data["sites"][1]["down_mbps"]
    with pytest.raises(BadInput, match="site 'b' lacks 'down_mbps'"):
        parse_fleet(data, gpus())


# ---- built-in fleets and files


@pytest.mark.parametrize(
    ("name", "workers"),
    [("azure-4", 4), ("straggler-8", 8), ("straggler-8-200", 8), ("halos-16", 16), ("aws-10", 10), ("home", 8), ("uniform-3", 3)],
)
def test_presets_load_and_every_pair_has_a_link(name: str, workers: int) -> None:
    fleet = load(name)
    assert fleet.name == name and fleet.n == workers and fleet.source
    assert all(fleet.link(i, j).flow_mbps > 0 for i in range(workers) for j in range(workers) if i != j)
    assert all(math.isfinite(v) for v in fleet.speeds(8, 512, 1e9))


def test_no_preset_is_left_out_above() -> None:
    assert set(presets()) == {"azure-4", "straggler-8", "straggler-8-200", "halos-16", "aws-10", "home", "uniform"}


def test_presets_say_what_the_design_says() -> None:
    azure = load("azure-4")
    assert [azure.site(i).gpu.name for i in range(4)] == ["H100 80GB", "A100 80GB", "L40S 48GB", "RTX 6000 Ada 48GB"]
    rates = [azure.link(i, j).rate_mbps for i in range(4) for j in range(4) if i != j]
    assert min(rates) == 580.0 and max(rates) == 940.0
    assert [azure.link(0, 3).latency_ms, azure.link(3, 0).latency_ms] == [37.0, 38.0]  # 74 and 76 ms there and back
    for name, slow in (("straggler-8", 100.0), ("straggler-8-200", 200.0)):
        assert [load(name).site(i).up_mbps for i in range(8)] == [1000.0] * 7 + [slow]
    halos = load("halos-16")
    assert (halos.link(0, 1).rate_mbps, halos.link(0, 4).rate_mbps, halos.link(12, 5).rate_mbps) == (100_000.0, 537.0, 117.0)
    speeds = halos.speeds(8, 512, 1e9)
    assert speeds[0] / speeds[15] == pytest.approx(0.232 / 0.788)
    home = load("home")
    assert any(home.site(i).up_mbps < home.site(i).down_mbps for i in range(home.n))
    aws = load("aws-10")
    assert {aws.site(0).region, aws.site(9).region} == {"Oregon", "Ireland"} and aws.link(0, 9).rate_mbps == 482.0


def test_uniform_takes_any_number() -> None:
    fleet = load("uniform-1000")
    assert fleet.n == 1000 and fleet == load("uniform", workers=1000)
    assert len(set(fleet.speeds(8, 512, 1e9))) == 1 and fleet.link(0, 999).rate_mbps == 1000.0
    for name, workers, message in (
        ("uniform", None, "needs a number"),
        ("uniform-0", None, "expected 1 or more"),
        ("azure-4", 5, "has 4 workers"),
    ):
        with pytest.raises(BadInput, match=message):
            load(name, workers)


def test_an_unknown_fleet_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"did you mean 'azure-4'.*aws-10.*uniform"):
        load("azur-4")


def test_a_fleet_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[sites]]\nname = "a"\nregion = "x"\ngpu = "T4 16GB"\nworkers = 2\nup_mbps = inf\ndown_mbps = 5\n')
    fleet = load(str(path))
    assert (fleet.name, fleet.n, fleet.site(1).up_mbps) == ("mine", 2, math.inf)
    path.write_text("[[sites]\n")
    with pytest.raises(BadInput, match="not TOML"):
        load(path)
    with pytest.raises(BadInput, match="cannot be read"):
        load(tmp_path / "none.toml")

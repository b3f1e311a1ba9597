"""`gossamer plan` says what a run costs where there are prices, and where outer state lives."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.app.config import load
from gossamer.app.footprint import outer_copies, outer_names
from gossamer.app.grids.cell import cell_hash
from gossamer.app.job import Job, resolve
from gossamer.app.planning.alternatives import others
from gossamer.app.planning.cost import aways, charged_tokens, cost
from gossamer.app.planning.forecast import forecast
from gossamer.app.planning.plan import plan, show
from gossamer.core.errors import BadInput
from gossamer.core.tree import numel
from gossamer.core.wires import Net

SITES = """currency = "EUR"
[[sites]]
name = "a"
region = "north"
gpu = "A100 80GB"
workers = 2
ranks = 4
up_mbps = 1000
down_mbps = 1000
{a}
[[sites]]
name = "b"
region = "south"
gpu = "A100 80GB"
up_mbps = 500
down_mbps = 500
{b}
[[links]]
between = ["north", "south"]
rate_mbps = 1000
rtt_ms = 20
"""


def job(folder: Path, *sets: str, a: str = "price_gpu_h = 2.5\nprice_egress_gb = 0.08", b: str = "price_gpu_h = 1") -> Job:
    file = folder / "priced.toml"
    file.write_text(SITES.format(a=a, b=b))
    return resolve(load(sets=[f"fleet.name={file}", "method.name=diloco", "run.device=auto", *sets]))


def printed(j: Job) -> str:
    out = io.StringIO()
    show(j, Console(file=out, width=250), forecast(j))
    return out.getvalue()


def test_the_cost_is_that_of_gpu_hours_and_of_what_leaves_a_region(tmp_path: Path) -> None:
    j = job(tmp_path)
    seen, rounds = forecast(j), j.method.rounds
    assert aways(j) == [0.5, 0.5, 1.0]
    found = cost(j, seen, j.method.total_tokens)
    hours, sent = rounds * seen.round_s / 3600, [rounds * b / 1e9 for b in seen.sent_bytes]
    assert found.gpu_h == pytest.approx(9 * hours) and found.gpus == pytest.approx((8 * 2.5 + 1) * hours)
    assert found.away_gb == pytest.approx(sent[0] / 2 + sent[1] / 2 + sent[2]) and found.egress == pytest.approx(
        0.08 * (sent[0] + sent[1]) / 2
    )
    text = printed(j)
    assert f"cost of the run: {found.total:,.2f} EUR: {found.gpus:,.2f} for {found.gpu_h:,.2f} GPU-hours" in text
    assert "no price of a GB of egress is given for b (price_egress_gb in the fleet file)" in text and "GPU-hour is given" not in text
    rows = others(j, Net(j.fleet))
    assert rows and all(row.cost is not None for row in rows)


def test_a_price_per_token_is_of_the_tokens_that_are_charged(tmp_path: Path) -> None:
    sets = ("plan.steps=4", "plan.batch=2", "plan.sequence=64", "run.rounds=3")
    plain, charged = job(tmp_path, *sets), job(tmp_path, *sets, "clock.charge_as=llama-150m", "clock.charge_tokens=65536")
    assert charged.method.total_tokens == 3 * 4 * 3 * 128 and charged_tokens(plain, 4608) is None
    assert charged_tokens(charged, charged.method.total_tokens) == 3 * 4 * 3 * 65536
    found = cost(charged, forecast(charged), charged.method.total_tokens)
    text = printed(charged)
    assert f"{1e6 * found.total / (36 * 65536):,.4g} EUR a million of the 2.36M tokens that are charged" in text
    assert "4.61k tokens, charged as 2.36M tokens, about" in text
    assert "EUR a million tokens" in printed(plain) and "charged" not in printed(plain)
    out = io.StringIO()
    plan(charged, Console(file=out, width=250))
    assert out.getvalue().count("4.61k tokens, charged as 2.36M tokens") == 3, "the run, the table of methods, and the choice"


def test_prices_are_optional_and_tell_no_run_from_another(tmp_path: Path) -> None:
    with_, without = job(tmp_path), job(tmp_path, a="", b="")
    assert with_.run_id == without.run_id and cell_hash(with_) == cell_hash(without) and with_.fleet == without.fleet
    assert "cost" not in printed(without) and others(without, Net(without.fleet))[0].cost is None
    with pytest.raises(BadInput, match="price_gpu_h of site 'b' is -1"):
        job(tmp_path, b="price_gpu_h = -1")


@pytest.mark.parametrize(
    "sets, wanted",
    [
        (["method.exchange=ring"], [0.0, 1.0, 1.0]),  # 0 -> 1 -> 2 -> 0
        (["method.exchange=hub", "method.hub=2"], [1.0, 1.0, 1.0]),
        (["method.name=gasloc", "method.topology=ring"], [0.5, 0.5, 1.0]),
        (["method.name=gasloc", "method.topology=one_peer"], [0.5, 0.5, 1.0]),
    ],
)
def test_who_is_told_decides_what_leaves(sets: list[str], wanted: list[float], tmp_path: Path) -> None:
    assert aways(job(tmp_path, *sets)) == wanted


def test_where_outer_state_lives_and_what_that_leaves_of_the_gpu(tmp_path: Path) -> None:
    sets = ("method.name=geomesh", "method.error_feedback=worker", "method.overlap=0.5")
    here, away = job(tmp_path, *sets), job(tmp_path, *sets, "run.offload=true")
    names, parameters = outer_names(here.method), numel(here.layout)
    assert names == ["anchor", "momentum", "residual", "parameters in flight"] and len(names) == outer_copies(here.method)
    line, off = (next(x for x in printed(j).splitlines() if x.startswith("outer state per worker")) for j in (here, away))
    size = f"{16 * parameters / 1e6:.1f} MB, {4 * parameters / 1e6:.1f} MB each: anchor, momentum, residual, parameters in flight"
    assert size in line and "in the GPU's memory" in line and size in off and "in the host's memory" in off and "pinned" in off
    fixed = [j.charged.footprint(j.method).fixed_bytes for j in (here, away)]
    assert fixed[0] - fixed[1] == 16 * parameters
    assert here.run_id == away.run_id and cell_hash(here) == cell_hash(away)
    assert replace(here.charged, offload=True) == away.charged

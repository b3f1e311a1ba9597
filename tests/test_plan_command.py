"""`gossamer plan`: what each worker gets, the other methods, and a choice."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.app.config import load as config_of
from gossamer.app.job import Job, resolve
from gossamer.app.planning.alternatives import Row, choice, others
from gossamer.app.planning.forecast import Forecast, forecast, simulated
from gossamer.app.planning.plan import plan, show, verdict, with_own
from gossamer.app.settings import Config
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.wires import Net

CHARGED = ("clock.charge_as=llama-150m", "clock.charge_tokens=65536")
OTHERS = (
    "DiLoCo",
    "CSS only",
    "AWB only, fp32",
    "GeoMesh",
    "GeoMesh + overlap",
    "GeoMesh by shard + overlap",
    "gossip (GASLoC, two peers)",
)


def job(*sets: str) -> Job:
    return resolve(config_of(sets=list(sets)))


def printed(j: Job) -> str:
    out = io.StringIO()
    plan(j, Console(file=out, width=200))
    return out.getvalue()


def test_each_worker_and_each_method_has_its_line() -> None:
    j = job(*CHARGED, "plan.name=awb")
    text, p = printed(j), j.method.plan
    for i in range(j.n):
        site = j.fleet.site(i)
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{i} ") and site.name in line).split()
        assert {str(p.steps[i]), str(p.batch[i]), f"{p.tokens(i):,}"} <= set(line)
    assert "geomesh (configured)" not in text, "it is one of the usual methods"
    for label in ("GeoMesh (configured)" if label == "GeoMesh" else label for label in OTHERS):
        assert sum(line.strip().startswith(f"{label}  ") for line in text.splitlines()) == 1, label
    assert "balance: " in text and "memory, H100 80GB: " in text and "outer state per worker" in text and "Choice: " in text
    assert "charged as llama-150m" in text


@pytest.mark.parametrize(
    "sets, label",
    [
        (["method.name=diloco", "plan.name=uniform"], "DiLoCo (configured)"),
        (["method.name=diloco", "plan.name=uniform", "name=mine"], "DiLoCo (configured)"),
        (["method.name=diloco", "plan.name=uniform", "method.outer_lr=0.5"], "diloco (configured)"),
        (["method.name=geomesh", "plan.name=uniform", "fleet.name=uniform-4"], "CSS only (configured)"),
        (["method.name=geomesh", "plan.name=awb", "fleet.name=uniform-4"], "GeoMesh (configured)"),
    ],
)
def test_the_configured_method_has_one_row(sets: list[str], label: str) -> None:
    j = job(*CHARGED, *sets)
    seen, usual = forecast(j), others(j, Net(j.fleet))
    rows = with_own(usual, replace(usual[0], label="diloco (configured)", plan=j.config.plan.name, forecast=seen, settings=()))
    assert [r.label for r in rows if r.label.endswith(" (configured)")] == [label]
    own = next(r for r in rows if r.label == label)
    assert len(rows) == len(usual) + (label == "diloco (configured)") and not own.settings and own.forecast == seen


def test_what_goes_on_is_told_before_it_is_shown() -> None:
    told: list[str] = []
    plan(job("fleet.name=uniform-2"), Console(file=io.StringIO()), told.append)
    assert told == ["a round is worked out", "the usual other methods are worked out"]


def test_the_table_has_the_methods_as_they_would_run() -> None:
    j = job(*CHARGED)
    rows = {r.label: r for r in others(j, Net(j.fleet))}
    assert tuple(rows) == OTHERS
    sets = ("method.name=geomesh", "method.overlap=0.5", "plan.name=awb")
    alone = job(*CHARGED, *sets)
    assert rows["GeoMesh + overlap"].forecast == forecast(alone)
    rounds = j.method.total_tokens / alone.method.plan.tokens_per_round
    assert rows["GeoMesh + overlap"].time_s == pytest.approx(rounds * forecast(alone).round_s)
    assert rows["GeoMesh"].time_s < rows["DiLoCo"].time_s and rows["AWB only, fp32"].time_s < rows["DiLoCo"].time_s
    assert rows["GeoMesh + overlap"].forecast.network < rows["GeoMesh"].forecast.network


def test_the_choice_says_what_to_set() -> None:
    j = job(*CHARGED)
    best = choice(others(j, Net(j.fleet)))
    assert "Its settings: " + " ".join(f"--set {s}" for s in best.settings) in printed(j)
    assert forecast(job(*CHARGED, *best.settings)) == best.forecast


def test_measured_step_times_beside_a_bigger_model_are_pointed_out(tmp_path: Path) -> None:
    sites = tmp_path / "measured.toml"
    sites.write_text(
        'name = "measured"\n[[sites]]\nname = "a"\nregion = "a"\ngpu = "A100 80GB"\nup_mbps = 100\ndown_mbps = 100\n'
        "step_s = [[64, 0.1], [128, 0.2]]\n"
    )
    assert "the step times of 1 of 1 sites are measured" in printed(job(*CHARGED, f"fleet.name={sites}"))
    assert "are measured" not in printed(job(f"fleet.name={sites}")) and "are measured" not in printed(job(*CHARGED))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_workers_have_all_methods_too(n: int) -> None:
    j = job(f"fleet.name=uniform-{n}")
    assert tuple(r.label for r in others(j, Net(j.fleet))) == OTHERS
    assert "Choice: " in printed(j)


def test_a_method_that_cannot_be_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Job.variant

    def refuses(self: Job, config: Config) -> Job:
        if config.method.name == "gasloc":
            raise BadInput("no peers here")
        return variant(self, config)

    monkeypatch.setattr(Job, "variant", refuses)
    j = job()
    assert tuple(r.label for r in others(j, Net(j.fleet))) == OTHERS[:-1]


def row(label: str, time_s: float) -> Row:
    return Row(label, "uniform", Forecast(1.0, [0.5], [0.1], [0.2], [0.25], [1.0], [1e6]), time_s)


def test_the_choice_is_the_quickest_and_of_equals_the_plainest() -> None:
    rows = [row("a", 100.0), row("b", 50.3), row("c", 50.0), row("d", 60.0)]
    assert choice(rows).label == "b"
    text = verdict(rows, tokens=2_000_000)
    assert "b with plan uniform" in text and "50 % less than a" in text and "50.0 % of the time" in text
    assert "20.0 % for slower ones and 25.0 % for the network" in text and "is not predicted" in text
    assert "less than" not in verdict([row("a", 1.0), row("b", 2.0)], 1000)


def test_a_method_with_servers_is_simulated() -> None:
    text = printed(job("method.name=halos", "fleet.name=halos-16", *CHARGED))
    assert "halos (configured)" in text and "Choice: " in text


def test_a_batch_that_does_not_fit_is_told() -> None:
    text = printed(job(*CHARGED, "method.name=diloco"))
    assert "B does not fit, so take it in parts" in next(line for line in text.splitlines() if "memory, L40S 48GB" in line)
    assert "does not fit" not in next(line for line in text.splitlines() if "memory, H100 80GB" in line)


def test_memory_of_one_gpu_that_is_not_alike_has_names(tmp_path: Path) -> None:
    site = '[[sites]]\nname = "{}"\nregion = "a"\ngpu = "A100 80GB"\nup_mbps = 100\ndown_mbps = 100\nmemory_gb = [[128, {}], [256, {}]]\n'
    here = tmp_path / "alike.toml"
    link = '[[links]]\nbetween = ["a", "a"]\nrate_mbps = 100\nrtt_ms = 1\n'
    sites = [site.format(name, gb, gb + 0.001) for name, gb in (("a", 0.4), ("b", 0.4), ("c", 0.5))]
    here.write_text('name = "alike"\n' + link + "".join(sites))
    lines = [line for line in printed(job(f"fleet.name={here}", "plan.name=uniform")).splitlines() if line.startswith("memory, ")]
    names = [line.partition(": ")[0] for line in lines]
    assert names == ["memory, A100 80GB, a with B = 8, b with B = 8", "memory, A100 80GB, c with B = 8"]
    assert all(re.search(r"room for B = \d{2},\d{3} with", line) for line in lines), lines


def test_few_bytes_are_not_none(tmp_path: Path) -> None:
    """An adapter of rank 1 sends some hundred bytes of signs."""
    shape = '{model_type = "llama", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2}'
    text = printed(job(f"model.config={shape}", "model.adapter={rank = 1}", "method.name=geomesh"))
    assert "0.0 MB" not in text and "0.00 MB" not in text
    sent = [line.split()[-2] for line in text.splitlines() if re.match(r" *[0-3]  ", line)]
    assert len(sent) == 4 and all(0 < float(mb) < 0.01 for mb in sent), sent


def test_a_model_that_does_not_fit_at_all_is_told_without_useless_advice(tmp_path: Path) -> None:
    site = '[[sites]]\nname = "a"\nregion = "a"\ngpu = "small"\nup_mbps = 100\ndown_mbps = 100\n'
    (tmp_path / "small.toml").write_text("[gpus.small]\ntflops = 1.0\nmemory_gb = 0.00001\n" + site)
    for name in ("uniform", "awb"):
        text = printed(job(f"fleet.name={tmp_path / 'small.toml'}", f"plan.name={name}"))
        line = next(line for line in text.splitlines() if "memory, small" in line)
        assert "not even one sequence fits" in line and "micro_batch" not in line and "plan.batch" not in line


def test_parts_that_fit_are_no_fault() -> None:
    text = printed(job(*CHARGED, "method.name=diloco", "plan.micro_batch=1"))
    line = next(line for line in text.splitlines() if "memory, L40S 48GB" in line)
    assert "B does not fit, so 1 at a time" in line


def test_carried_steps_are_told() -> None:
    sets = (*CHARGED, "plan.name=awb", "plan.batch=6", "plan.batch_max=16", "plan.steps=3")
    whole, carried = (printed(job(*sets, f"plan.carry={carry}")) for carry in ("false", "true"))
    assert "gains back" in carried and "gains back" not in whole
    assert "; +0 tokens a round from those asked for" in carried


def thousand(path: Path) -> Path:
    kinds = ("A100 80GB", "L40S 48GB", "H100 80GB", "T4 16GB")
    sites = [
        f'[[sites]]\nname = "s{i}"\nregion = "r{i % 10}"\ngpu = "{kinds[7 * i % 4]}"\n'
        f"up_mbps = {100 + 37 * i % 1000}\ndown_mbps = {200 + i}\n"
        for i in range(1000)
    ]
    links = [
        f'[[links]]\nbetween = ["r{a}", "r{b}"]\nrate_mbps = {500 + 50 * a + b}\nrtt_ms = 20\n' for a in range(10) for b in range(a, 10)
    ]
    path.write_text("".join(sites + links))
    return path


@pytest.mark.parametrize("awb", [False, True])
def test_a_thousand_workers_are_planned_without_looking_at_every_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awb: bool) -> None:
    sets = (f"fleet.name={thousand(tmp_path / 'ten.toml')}", "plan.name=awb") if awb else ("fleet.name=uniform-1000",)
    links, steps = 0, 0
    link, step_s = Fleet.link, Fleet.step_s

    def count_link(self: Fleet, i: int, j: int) -> object:
        nonlocal links
        links += 1
        return link(self, i, j)

    def count_step(self: Fleet, *arguments: object) -> float:
        nonlocal steps
        steps += 1
        return step_s(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Fleet, "link", count_link)
    monkeypatch.setattr(Fleet, "step_s", count_step)
    j = job(*sets, *CHARGED)
    text = printed(j)
    assert "... and 976 more workers" in text and "Choice: " in text
    assert links <= 20 * 100 and steps <= 50 * 1000
    assert 2 * abs(j.method.plan.tokens_per_round - 1000 * 30 * 8 * 128) <= 8 * 128 and min(j.method.plan.steps) >= 1


def test_a_timing_only_run_shows_the_same_table() -> None:
    out = io.StringIO()
    j = job(*CHARGED, "run.rounds=2")
    show(j, Console(file=out, width=200), simulated(j))
    assert "h100" in out.getvalue() and "mean: utilisation" in out.getvalue() and "Choice" not in out.getvalue()

"""gossamer.join at the start: methods however they are given, equal first parameters, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from library_toys import ADAM, SMALL, users
from toy import ToyBody, ToyModel

import gossamer
from gossamer.core.plan import uniform
from gossamer.real import Group
from gossamer.recipes import Setting, diloco, geomesh


def test_first_parameters_must_be_equal_or_are_taken_from_one() -> None:
    method = diloco(SMALL)

    def job(sync: str, group: Group) -> Any:
        body = ToyBody(group.me, ADAM)
        with torch.no_grad():
            body.params["bias"].add_(group.me)
        outer = gossamer.join(body.model, body.optimizer, method, workers=group, sync=sync)
        taken = body.params["bias"].detach().clone()
        body.gradient(2)
        body.take()
        outer.step()
        outer.close()
        return taken

    with pytest.raises(gossamer.BadInput, match=r'worker 1 are not those of worker 0: .*sync="from:0"'):
        users(2, partial(job, "check"))
    assert all(torch.equal(t, torch.ones(7)) for t in users(2, partial(job, "from:1")))


def test_who_has_another_method_is_named() -> None:
    def job(group: Group) -> None:
        body = ToyBody(group.me, ADAM)
        amount: Any = {"steps": 3, "batch": 2, "sequence": 4, "rounds": 4 + (group.me == 2)}
        gossamer.join(body.model, body.optimizer, "diloco", workers=group, **amount)

    with pytest.raises(gossamer.RunFailed, match="worker 2 has another method, plan or length of the run"):
        users(3, job)


AMOUNT: dict[str, Any] = {"steps": 3, "batch": 2, "sequence": 4, "rounds": 4}


def test_the_same_method_by_name_by_recipe_by_setting_and_by_file(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text(
        '[method]\nname = "diloco"\nouter_lr = 0.5\n[plan]\nsteps = 3\nbatch = 2\nsequence = 4\n[run]\nrounds = 4\n[fleet]\n'
        'name = "uniform"\nworkers = 1\n'
    )
    made = diloco(Setting(uniform(1, 3, 2, 4), 4), outer_lr=0.5)
    ways: list[Any] = [("diloco", {"options": {"outer_lr": 0.5}, **AMOUNT}), (partial(diloco, outer_lr=0.5), AMOUNT)]
    ways += [(made, {}), (str(tmp_path / "run.toml"), {}), ("gossamer.recipes.sync.diloco", {"options": {"outer_lr": 0.5}, **AMOUNT})]
    for method, given in ways:
        model = ToyModel()
        with gossamer.join(model, torch.optim.SGD(model.parameters(), 0.1), method, **given) as outer:
            assert outer.seat.method == made
    tokens = {**AMOUNT, "rounds": None, "tokens": 4 * 24 - 1}
    model = ToyModel()
    with gossamer.join(model, torch.optim.SGD(model.parameters(), 0.1), partial(diloco, outer_lr=0.5), **tokens) as outer:
        assert outer.seat.method == made and outer.work == (3, 2, 4, 0, 4, 0, 0.0, 96)


@pytest.mark.parametrize(
    ("method", "given", "says"),
    [
        ("dilco", AMOUNT, "did you mean"),
        ("diloco", {"rounds": 3}, "steps is missing"),
        ("diloco", {**AMOUNT, "tokens": 100}, "one of the two"),
        ("diloco", {**AMOUNT, "options": {"outer_lrr": 1.0}}, "did you mean outer_lr"),
        (geomesh, {**AMOUNT, "options": {"outer_lr": 1.0}}, "leave options out"),
        ("diloco", {**AMOUNT, "steps": (3, 3)}, "2 numbers for 1 workers"),
        ("diloco", {**AMOUNT, "plan": "proportional"}, "there is none: give fleet"),
        ("diloco", {**AMOUNT, "fleet": "azure-4"}, "4 workers, and 1 processes"),
        ("ddp", {**AMOUNT, "steps": 1}, "DistributedDataParallel"),
        ("halos", AMOUNT, "servers"),
        (diloco(Setting(uniform(2, 3, 2, 4), 4)), {}, "for 2 workers, and 1 processes"),
        (diloco(Setting(uniform(1, 3, 2, 4), 4)), {"steps": 3}, "steps is part of a method already"),
        ("diloco", {**AMOUNT, "sync": "0"}, "from:0"),
        ("diloco", {**AMOUNT, "on_lost": "record"}, "needs every worker"),
        ("streaming_diloco", {**AMOUNT, "options": {"fragments": 9}}, "fragments"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(method: Any, given: Any, says: str) -> None:
    model = ToyModel()
    with pytest.raises(gossamer.BadInput, match=says):
        gossamer.join(model, torch.optim.SGD(model.parameters(), 0.1), method, **given)


def test_models_and_optimizers_that_do_not_fit_are_refused() -> None:
    model, other = ToyModel(), ToyModel()
    frozen = ToyModel().requires_grad_(False)
    wrapped = torch.nn.DataParallel(model)
    for m, o, says in ((model, other, "none of the model's"), (frozen, frozen, "unfreeze"), (wrapped, model, "wrapped in DataParallel")):
        with pytest.raises(gossamer.BadInput, match=says):
            gossamer.join(m, torch.optim.SGD(o.parameters(), 0.1), "diloco", **AMOUNT)


def test_a_state_of_another_run_is_refused() -> None:
    model = ToyModel()
    join = partial(gossamer.join, model, torch.optim.SGD(model.parameters(), 0.1))
    with join("diloco", **AMOUNT) as outer:
        kept = outer.state_dict()
    for found, says in (
        (kept, "another method"),
        ({**kept, "worker": 3}, "worker 3"),
        ({**kept, "workers": 2}, "2 workers"),
        ({}, "no state"),
    ):
        with join("diloco", **{**AMOUNT, "rounds": 5}) as outer, pytest.raises(gossamer.BadInput, match=says):
            outer.load_state_dict(found)

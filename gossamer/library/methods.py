"""A method for the workers that are there, from what a user says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gossamer.app import fleets
from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.options import check_options, find_recipe
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.matching import Rates
from gossamer.core.method import Method
from gossamer.core.plan import Plan, proportional
from gossamer.core.schedule import Cosine, Schedule
from gossamer.core.tiers import regions_of
from gossamer.recipes import DEFAULT_PLAN, REGISTRY, Setting

MethodLike: TypeAlias = str | Path | Method | Callable[[Setting], Method]
"""A recipe's name or dotted path ("diloco"), a recipe or anything else that makes a method of a setting
(`functools.partial(gossamer.recipes.diloco, outer_lr=0.5)`), a method, or the configuration file of a run."""


@dataclass(frozen=True)
class Amount:
    """How much each worker does, and for how long: what a recipe needs beside its options. A method and a configuration file have it
    already."""

    steps: int | Sequence[int] | None = None
    """H, inner steps a round: of all workers, or of each."""
    batch: int | Sequence[int] | None = None
    """B, sequences a step: of all workers, or of each."""
    sequence: int | None = None
    """L, tokens of a sequence."""
    rounds: int | None = None
    tokens: int | None = None
    """Of all workers in the whole run, in place of `rounds`: to the next whole round."""
    plan: Literal["auto", "uniform", "proportional"] = "auto"
    """proportional: H_i by the speeds of the fleet, `steps` in the mean; auto: the method's own where there is a fleet, else uniform."""
    fleet: str | Fleet | None = None
    """The workers and the links between them: a built-in fleet, a TOML file, or a fleet. None: all alike."""
    schedule: Schedule | None = None
    """Of the learning rate; None: cosine."""
    seed: int = 0
    """Of the peers of random topologies."""


def method_of(method: MethodLike, options: Mapping[str, Any] | None, amount: Amount, n: int, parameters: int) -> Method:
    """The method for `n` workers.

    Args:
        options: of a recipe given by name or path.
        parameters: of the model, by which a fleet's speeds are estimated: 6 floating-point operations each and token.

    Raises:
        BadInput: something is missing, given twice, or for another number of workers; or the method needs what a training loop does not
            give.
    """
    if isinstance(method, str) and not method.endswith(".toml"):
        recipe = find_recipe(method)
        checked = check_options(recipe, options or {}, reserved=("setting",))
        found = recipe(_setting(amount, n, parameters, method), **checked)
    else:
        if options:
            raise BadInput(f"options {dict(options)} go with a method by name; here the method has its own: leave options out")
        if isinstance(method, str | Path):
            found = _of_file(Path(method), amount)
        elif isinstance(method, Method):
            _check_unused(amount, "a method")
            found = method
        else:
            found = method(_setting(amount, n, parameters, getattr(method, "__name__", "")))
    if not isinstance(found, Method):
        raise BadInput(f"the recipe has returned {type(found).__name__}: expected a function of a setting that returns a Method")
    if found.n != n:
        raise BadInput(f"the method is for {found.n} workers, and {n} processes were started: make them equal")
    _check_fits(found)
    return found


def _of_file(path: Path, amount: Amount) -> Method:
    _check_unused(amount, f"the configuration {path}")
    job = resolve(load([path]))
    if job.config.wan.sites:
        raise BadInput(
            f"{path} is of a run of sites on the internet (wan.sites), and gossamer.join connects workers by gloo: use gossamer wan join, "
            "or leave wan.sites out"
        )
    if max(job.fleet.ranks) > 1:
        raise BadInput(f"a worker of the fleet in {path} has several ranks, and gossamer.join is one process a worker: use gossamer train")
    return job.method


def _check_unused(amount: Amount, where: str) -> None:
    said = [name for name, default in vars(Amount()).items() if getattr(amount, name) != default]
    if said:
        raise BadInput(f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} part of {where} already: leave out")


def _setting(amount: Amount, n: int, parameters: int, name: str) -> Setting:
    for what in ("steps", "batch", "sequence"):
        if getattr(amount, what) is None:
            raise BadInput(
                f"{what} is missing: a recipe needs steps (H, optimizer steps between exchanges), batch (B, sequences a step), sequence "
                "(L, tokens of one) and rounds or tokens"
            )
    if (amount.rounds is None) == (amount.tokens is None):
        raise BadInput("give the length of the run as rounds or as tokens (of all workers together), one of the two")
    fleet = amount.fleet
    if isinstance(fleet, str):
        fleet = fleets.load(fleet, n if fleet == "uniform" else None)
    if fleet is not None and fleet.n != n:
        raise BadInput(f"fleet {fleet.name} has {fleet.n} workers, and {n} processes were started: make them equal")
    assert amount.sequence is not None
    kind = amount.plan if amount.plan != "auto" else DEFAULT_PLAN.get(name, "uniform") if fleet else "uniform"
    steps, batch = _each(amount.steps, n, "steps"), _each(amount.batch, n, "batch")
    plan, speeds, regions = Plan(steps, batch, amount.sequence), (1.0,) * n, (0,) * n
    if fleet is not None:
        speeds = tuple(fleet.speeds(batch, amount.sequence, 6.0 * parameters))
        regions = regions_of([fleet.site(i).region for i in range(n)])
    if kind == "proportional":
        if fleet is None:
            raise BadInput('plan = "proportional" goes by the speeds of a fleet, and there is none: give fleet, or steps of each worker')
        if len(set(steps)) > 1 or len(set(batch)) > 1:
            raise BadInput('plan = "proportional" chooses the steps of each worker itself: give one number of steps and one batch')
        plan = proportional(speeds, steps[0], batch[0], amount.sequence)
    rounds = amount.rounds or plan.rounds_of(amount.tokens or 0)
    setting = Setting(plan, rounds, seed=amount.seed, schedule=amount.schedule or Cosine(), speeds=speeds, regions=regions)
    return setting if fleet is None else replace(setting, rates=lambda: Rates.of(fleet))


def _each(given: int | Sequence[int] | None, n: int, what: str) -> tuple[int, ...]:
    assert given is not None
    if isinstance(given, int):
        return (given,) * n
    if len(given) != n:
        raise BadInput(f"{what} has {len(given)} numbers for {n} workers: give one for all, or one each")
    return tuple(given)


def _check_fits(method: Method) -> None:
    if method.tiers is not None:
        raise BadInput(
            f"{method.name} has servers, which are processes without a training loop: use gossamer train, or one of "
            f"{', '.join(name for name in REGISTRY if name not in ('halos', 'ddp'))}"
        )
    if method.outer.says == "gradient":
        raise BadInput(
            f"{method.name} exchanges gradients, before the optimizer has stepped: wrap the model in torch's DistributedDataParallel for "
            "that, or use a method with more than one step between exchanges"
        )

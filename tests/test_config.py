"""Configuration: what is accepted, what is refused and in which words, and that a printed configuration is the same one."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gossamer.app.config import Config, config_hash, dump, load, override, parse
from gossamer.app.job import resolve
from gossamer.app.options import check_options, find_recipe, known_options
from gossamer.app.planning.planned import planned
from gossamer.app.settings import METHODS
from gossamer.app.settings.base import Section
from gossamer.app.settings.options import OPTIONS
from gossamer.app.summary import summarise
from gossamer.core.errors import BadInput
from gossamer.core.inner import INNERS
from gossamer.core.schedule import SCHEDULES
from gossamer.recipes import REGISTRY

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def refusal(*sets: str) -> str:
    with pytest.raises(BadInput) as caught:
        load(sets=sets)
    return str(caught.value)


def sections() -> dict[str, type[Section]]:
    return {k: f.annotation for k, f in Config.model_fields.items() if isinstance(f.annotation, type) and issubclass(f.annotation, Section)}


def test_names_in_the_settings_are_the_names_in_the_library() -> None:
    assert set(METHODS) == set(REGISTRY)
    assert {name: list(options) for name, options in OPTIONS.items()} == {name: list(known_options(REGISTRY[name])) for name in REGISTRY}
    inner = sections()["inner"].model_fields["name"].annotation
    schedule = sections()["schedule"].model_fields["name"].annotation
    assert set(inner.__args__) == {"", *INNERS}  # type: ignore[union-attr]
    assert set(schedule.__args__) == set(SCHEDULES)  # type: ignore[union-attr]


def test_every_setting_is_described() -> None:
    fields = {f"{name}.{key}": f for name, section in sections().items() for key, f in section.model_fields.items()}
    assert len(fields) > 30
    assert not [key for key, field in fields.items() if not field.description]
    assert all(section.__doc__ for section in sections().values())


# Refusals


@pytest.mark.parametrize(
    "setting, words",
    [
        ("plan.step=3", ["unknown key plan.step;", "did you mean plan.steps?"]),
        ("modle.preset=x", ["unknown key modle;", "did you mean model?"]),
        ("steps=3", ["unknown key steps;", "did you mean plan.steps?"]),
        ("inner.steps=3", ["unknown key inner.steps;", "did you mean plan.steps?"]),
        ("lr=0.1", ["did you mean inner.lr?"]),
        ("data.zebra=1", ["unknown key data.zebra; the keys of [data] are source, tokenizer"]),
        ("zebra=1", ["unknown key zebra; known here: name, seed, method"]),
        ("plan.steps=0", ["plan.steps = 0: expected a whole number, at least 1 (inner steps in a round, H", "default, 30"]),
        ("plan.steps=2.5", ["plan.steps = 2.5: expected a whole number"]),
        ("plan.steps=many", ['plan.steps = "many": expected a whole number']),
        ("plan.steps=true", ["plan.steps = true: expected a whole number"]),
        ("seed=-1", ["seed = -1: expected a whole number, at least 0"]),
        ("clock.noise=nan", ["clock.noise = NaN: expected a number"]),
        ("clock.noise=1", ["clock.noise = 1", "below 1"]),
        ("inner.lr=0", ["inner.lr = 0: expected a number, above 0"]),
        ("data.source=true", ["data.source = true: expected text in quotes"]),
        ("eval.target_perplexity=0.5", ["eval.target_perplexity = 0.5: expected a number, above 1", "never reaches 1"]),
        ("schedule.name=cosin", ['schedule.name = "cosin": expected one of "cosine"', 'Did you mean "cosine"?']),
        ("run.on_death=wait", ['run.on_death = "wait": expected one of "auto", "stop", "continue"']),
        ("model.config=3", ["model.config = 3: expected text in quotes or a table"]),
        ("method.name=dilco", ['method.name = "dilco" is not a method; did you mean "diloco"?', "dotted path"]),
        ("method=diloco", ["method is a section", 'did you mean method.name = "diloco"?']),
        ("plan=3", ["plan = 3: plan is a section with the keys name, steps, batch, sequence"]),
        ("method.alpha={a=1}", ['method.alpha = {"a": 1}: expected a number, text, true or false']),
        ("seed.x=1", ['seed = {"x": 1}: expected a whole number']),
    ],
)  # fmt: skip
def test_refusals_name_key_value_expectation_and_remedy(setting: str, words: list[str]) -> None:
    message = refusal(setting)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert "pydantic" not in message


def test_all_faults_are_told_at_once() -> None:
    message = refusal("plan.steps=0", "plan.batch=x", "sed=1")
    assert message.startswith("the configuration has 3 faults:")
    assert len(message.splitlines()) == 4


def test_rounds_and_tokens_exclude_each_other() -> None:
    with pytest.raises(BadInput, match=r"run\.rounds = 5 and run\.tokens = 1000 both give the length .* remove one"):
        parse({"run": {"rounds": 5, "tokens": 1000}})
    assert (load().run.rounds, load().run.tokens) == (20, None)
    by_tokens = load(sets=["run.tokens=1000"])
    assert (by_tokens.run.rounds, by_tokens.run.tokens) == (None, 1000)
    # What is given later replaces the other of the two.
    assert override(by_tokens, {"run.rounds": 7}).run.tokens is None
    assert override(by_tokens, {"run.out": "x"}).run.tokens == 1000


def test_configurations_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load().plan.steps = 3


# Files and --set


def test_later_files_and_sets_override_earlier_ones(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('seed = 1\n[plan]\nsteps = 10\nbatch = 2\n[method]\nname = "gasloc"\nmomentum = "mixed"\n')
    two.write_text("[plan]\nsteps = 20\n")
    config = load([one, two], ["plan.batch=4", "method.alpha=0.5"])
    assert (config.seed, config.plan.steps, config.plan.batch) == (1, 20, 4)
    assert config.method.options == {"momentum": "mixed", "alpha": 0.5}


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("seed = = 1\n")
    with pytest.raises(BadInput, match=r"there is no file .*dmo\.toml; did you mean .*demo\.toml\?"):
        load([tmp_path / "dmo.toml"])
    with pytest.raises(BadInput, match=r"demo\.toml is not valid TOML: .*line 1"):
        load([tmp_path / "demo.toml"])
    with pytest.raises(BadInput, match="cannot be read as a configuration file"):
        load([tmp_path])


@pytest.mark.parametrize(
    "text, read",
    [
        ("method.v=3", 3), ("method.v=3.5", 3.5), ("method.v=1e-3", 1e-3), ("method.v=true", True), ('method.v="3"', "3"),
        ("method.v=sign", "sign"), (" method.v = a b ", "a b"), ("method.v=[1, 2]", [1, 2]), ("method.v=", ""), ("method.v=a=b", "a=b"),
        ("method.v=2026-01-01", "2026-01-01"), ("method.v=1\nb = 2", "1\nb = 2"), ("method.v=../text", "../text"),
    ],
)  # fmt: skip
def test_set_reads_toml_values_and_plain_text(text: str, read: Any) -> None:
    value = load(sets=[text]).method.options["v"]
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize("text", ["plan.steps", "=3", "", "a b=3", ".steps=3", "plan..steps=3"])
def test_set_without_a_key_or_a_value_is_refused(text: str) -> None:
    assert "expected key=value, such as --set plan.steps=10" in refusal(text)


# Round trip and hash

texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
options = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda k: k != "name"), st.integers() | numbers | st.booleans() | texts
)


@given(
    data=st.fixed_dictionaries(
        {
            "name": texts,
            "method": options,
            "run": st.one_of(st.just({}), st.fixed_dictionaries({"tokens": st.integers(1, 10**15)}), st.just({"rounds": 3, "out": "a"})),
            "inner": st.fixed_dictionaries({}, optional={"lr": st.floats(1e-12, 1e3), "clip": st.just(0), "weight_decay": st.just(1)}),
            "model": st.one_of(st.just({}), st.just({"config": {"model_type": "llama", "sizes": [1, 2], "rope": {"theta": 1e4}}})),
            "eval": st.fixed_dictionaries({}, optional={"target_perplexity": st.floats(1.01, 1e6)}),
        }
    )
)
def test_a_printed_configuration_loads_to_an_equal_one(data: dict[str, Any]) -> None:
    config = parse(data)
    again = parse(tomllib.loads(dump(config)))
    assert again == config
    assert dump(again) == dump(config)
    assert config_hash(again) == config_hash(config)


def test_the_hash_covers_what_workers_must_agree_on() -> None:
    base = config_hash(load())
    assert 0 <= base < 2**64
    for local in ("run.out=x", "run.threads_per_worker=3", "run.device=cpu", "run.offload=true", "name=label"):
        assert config_hash(load(sets=[local])) == base, local
    for shared in ("seed=1", "method.name=diloco", "method.alpha=1", "inner.lr=1", "plan.steps=2", "model.preset=x", "data.limit_mb=1",
                   "run.rounds=2", "run.tokens=2", "fleet.name=home", "schedule.floor=0"):  # fmt: skip
        assert config_hash(load(sets=[shared])) != base, shared


def test_the_sections_say_what_was_given() -> None:
    config = load(sets=["inner.clip=0", "inner.lr=1", "schedule.floor=0.5"])
    assert config.inner.given() == {"lr": 1.0, "clip": None}
    assert config.schedule.given() == {"floor": 0.5}
    assert load().inner.given() == {}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_load_and_their_options_exist(path: Path) -> None:
    config = load([path])
    check_options(find_recipe(config.method.name), config.method.options)


# Options of a method


def recipe(
    setting: object,
    *,
    alpha: float = 1.0,
    count: int = 2,
    flag: bool = False,
    form: Literal["local", "mixed"] = "local",
    betas: tuple[float, float] = (0.9, 0.95),
    block: int | None = None,
    thing: object | None = None,
) -> None:
    """A recipe as the checker sees it."""


def test_options_take_the_types_of_the_recipe() -> None:
    given = {"alpha": 2, "count": 3, "flag": True, "form": "mixed", "betas": [0, 0.5], "block": 64}
    checked = check_options(recipe, given)
    assert checked == {"alpha": 2.0, "count": 3, "flag": True, "form": "mixed", "betas": (0.0, 0.5), "block": 64}
    assert type(checked["alpha"]) is float
    assert type(checked["betas"][0]) is float
    assert list(known_options(recipe)) == ["alpha", "count", "flag", "form", "betas", "block"]


@pytest.mark.parametrize(
    "option, message",
    [
        ({"alfa": 1}, r"unknown key method\.alfa: recipe has no such option; did you mean alpha\?"),
        ({"nam": "x"}, r"unknown key method\.nam: recipe has no such option; did you mean method\.name\?"),
        ({"zebra": 1}, r"unknown key method\.zebra: .* its options are alpha, count, flag, form, betas, block"),
        ({"setting": 1}, r"unknown key method\.setting"),
        ({"thing": 1}, r"unknown key method\.thing"),
        ({"alpha": "big"}, r'method\.alpha = "big": recipe expects a number'),
        ({"alpha": True}, r"method\.alpha = true: recipe expects a number"),
        ({"count": 1.5}, r"method\.count = 1\.5: recipe expects a whole number"),
        ({"count": True}, r"method\.count = true"),
        ({"flag": 1}, r"method\.flag = 1: recipe expects true or false"),
        ({"form": "mixd"}, r'method\.form = "mixd": recipe expects one of "local", "mixed"; did you mean "mixed"\?'),
        ({"betas": [0.9]}, r"method\.betas = \[0\.9\]: recipe expects a list \(2 values, each a number\)"),
        ({"betas": 0.9}, r"method\.betas = 0\.9"),
        ({"block": "x"}, r'method\.block = "x": recipe expects a whole number'),
    ],
)
def test_wrong_options_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_options(recipe, option)


def test_reserved_options_belong_to_other_sections() -> None:
    with pytest.raises(BadInput, match="alpha is set by another section"):
        check_options(recipe, {"alpha": 1}, reserved=("alpha",))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_options_of_every_method_can_be_written_in_a_file(name: str) -> None:
    optional = [k for k, p in inspect.signature(REGISTRY[name]).parameters.items() if p.default is not p.empty]
    assert list(known_options(REGISTRY[name])) == optional


def test_recipes_by_dotted_path() -> None:
    assert find_recipe("gossamer.recipes.diloco") is find_recipe("diloco") is REGISTRY["diloco"]
    assert load(sets=["method.name=mymodule.mine"]).method.name == "mymodule.mine"
    with pytest.raises(BadInput, match="cannot be imported"):
        find_recipe("no_such_module.mine")
    with pytest.raises(BadInput, match="expected a function"):
        find_recipe("gossamer.recipes.DEFAULT_PLAN")


def test_a_mistyped_path_of_a_recipe_is_told_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistyped_methods.py").write_text("def heavy(setting): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("mistyped_method.heavy", "mistyped_methods.heavi"):
        with pytest.raises(BadInput, match=r'cannot be imported .* did you mean "mistyped_methods.heavy"\?'):
            find_recipe(path)
    with pytest.raises(BadInput, match=r"importable from here$"):
        find_recipe("nothing_like_it.heavy")


def test_a_recipe_of_ones_own_is_shown_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its method has kept the name of the one that it was made of."""
    (tmp_path / "mine_shown.py").write_text(
        "from dataclasses import replace\n"
        "from gossamer.core.outer import OuterSGD\n"
        "from gossamer.recipes import diloco\n"
        "def heavy(setting):\n    return replace(diloco(setting), outer=OuterSGD(0.7, 0.99))\n"
        "def named(setting):\n    return replace(heavy(setting), name='heavy_ball')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    paths = ("mine_shown.heavy", "mine_shown.named", "diloco", "gossamer.recipes.diloco")
    jobs = [resolve(load(sets=[f"method.name={path}", "run.rounds=2"])) for path in paths]
    shown = ["mine_shown.heavy", "heavy_ball", "diloco", "diloco"]
    assert [job.title for job in jobs] == [planned(job, "sim")["method"] for job in jobs] == shown
    told = [summarise(job, "sim", [], final_loss=None, worker_losses=None, distance=None, hashes=[], model=None) for job in jobs]
    assert [summary["method"] for summary in told] == [summary["name"] for summary in told] == shown
    assert jobs[0].method.name == "diloco"  # which marks runs and cells that are there already

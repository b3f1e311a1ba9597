"""The documentation is true: its code runs, its commands parse, its keys, options, fields, files and names exist.

Fences with more than a language are looked at: ```python run is executed (all of a page in one namespace), ```python file=NAME and
```toml file=NAME are written beside it first, ```toml config is a configuration, ```sh holds commands.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from gossamer.app import config as configuration
from gossamer.app.early import check_workers, fitted
from gossamer.app.job import resolve
from gossamer.app.options import find_recipe, known_options
from gossamer.cli import app
from gossamer.recipes import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "lab-notes.md")
"""lab-notes.md is a log: it keeps what was true on its day."""

USAGE_ERROR = typer.BadParameter.__mro__[1]
"""click's UsageError, wherever this release of typer keeps click."""

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)


class Fence(NamedTuple):
    language: str
    what: str
    text: str
    line: int


def fences(text: str) -> list[Fence]:
    found = []
    for m in _FENCE.finditer(text):
        language, _, what = m[1].strip().partition(" ")
        found.append(Fence(language, what.strip(), m[2], text[: m.start()].count("\n") + 2))
    return found


def prose(text: str) -> str:
    """A page without its fences."""
    return _FENCE.sub("", text)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every table row."""
    for line in text.splitlines():
        if line.startswith("|") and not set(line) <= set("|-: "):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of its level or a higher one."""
    level = heading.split(" ")[0]
    match = re.search(rf"^{re.escape(heading)}$(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.M | re.S)
    assert match, f"no heading {heading!r}"
    return match[1]


def written(folder: Path, text: str) -> None:
    for fence in fences(text):
        if fence.what.startswith("file="):
            (folder / fence.what.removeprefix("file=")).write_text(fence.text, encoding="utf-8")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if "." not in name and Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


def test_there_are_pages() -> None:
    assert {p.stem for p in PAGES} >= {"architecture", "methods", "clock", "run-folder", "configuration", "extend", "real-runs"}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_code_runs(path: Path, beside: Path) -> None:
    text = path.read_text(encoding="utf-8")
    written(beside, text)
    names: dict[str, Any] = {"__name__": "__docs__"}
    for fence in fences(text):
        if (fence.language, fence.what) == ("python", "run"):
            exec(compile("\n" * (fence.line - 1) + fence.text, str(path), "exec"), names)
        if (fence.language, fence.what) == ("toml", "config"):
            (beside / "example.toml").write_text(fence.text, encoding="utf-8")
            resolve(configuration.load([beside / "example.toml"]))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_fences_are_of_a_known_kind(path: Path) -> None:
    known = {("python", "run"), ("python", ""), ("toml", "config"), ("sh", ""), ("json", "")}
    odd = [(f.language, f.what) for f in fences(path.read_text()) if (f.language, f.what) not in known and not f.what.startswith("file=")]
    assert not odd, "a fence that no test looks at"


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `gossamer ...` command: in ```sh fences, and in backticks."""
    lines = [line for f in fences(text) if f.language == "sh" for line in f.text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(text))
    for line in lines:
        match = re.search(r"(?:^|\s)(?:-m )?gossamer ((?:[a-z-]).*)$", line)
        if match:
            yield shlex.split(match[1], comments=True)


def check_command(arguments: list[str]) -> dict[str, Any]:
    """The parameters of a command, as the command line would parse them. click raises on what does not exist."""
    group = typer.main.get_command(app)
    if arguments[0] in ("--version", "--help", "-h", "--install-completion", "--show-completion"):
        return {}
    command = group.get_command(None, arguments[0])  # type: ignore[attr-defined]
    assert command is not None, f"gossamer has no command {arguments[0]!r}"
    while hasattr(command, "get_command") and len(arguments) > 1:  # a group, such as wan
        arguments = arguments[1:]
        command = command.get_command(None, arguments[0])
        assert command is not None, f"gossamer has no command {arguments[0]!r} there"
    if len(arguments) == 1:
        return {}
    return command.make_context(arguments[0], list(arguments[1:]), color=False).params


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_commands_exist_and_their_settings_load(path: Path, beside: Path) -> None:
    text = path.read_text(encoding="utf-8")
    written(beside, text)
    for arguments in commands(text):
        params = check_command(arguments)
        given = params.get("configs") or []
        for file in given:
            assert (ROOT / file).is_file() or not str(file).startswith("configs/"), f"there is no {file}"
        files = [ROOT / file for file in given if (ROOT / file).is_file()]
        sets = [s for s in params.get("sets") or [] if not s.startswith("KEY=")]
        workers = None if params.get("resume") else params.get("workers")
        if files or sets:
            resolve(fitted(configuration.load(files, sets), workers))
        files = [folder / file for file in given for folder in (ROOT, beside) if (folder / file).is_file()]
        if arguments[0] == "train" and workers and len(files) == len(given):
            check_workers(fitted(configuration.load(files, sets), workers), workers)


def test_every_key_is_documented_with_its_default() -> None:
    """Every setting, its default, and no other."""
    said = {cells[0].strip("`"): cells[1] for cells in rows(page("configuration.md")) if cells[0].startswith("`")}
    leaves = configuration._leaves()
    assert sorted(said) == sorted(leaves)
    sections = configuration._sections()
    for leaf in leaves:
        where, _, key = leaf.rpartition(".")
        fields = (sections[where] if where else configuration.Config).model_fields
        default = fields[key].default
        want = "-" if default is None else f"`{json.dumps(default)}`"
        assert said[leaf] == want, f"{leaf}: its default is {want}, the page says {said[leaf]}"


def test_every_choice_of_a_setting_is_named() -> None:
    said = {cells[0].strip("`"): cells[2] for cells in rows(page("configuration.md")) if cells[0].startswith("`")}
    for where, model in configuration._sections().items():
        for key, field in model.model_fields.items():
            for choice in re.findall(r"'([a-z0-9]+)'", str(field.annotation)) if "Literal" in str(field.annotation) else ():
                assert choice in said[f"{where}.{key}"], f"{where}.{key} may be {choice}"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_of_a_method_is_documented_with_its_default(name: str) -> None:
    import inspect

    recipe = find_recipe(name)
    said = {cells[0].strip("`"): cells[1] for cells in rows(section(page("methods.md"), f"### {name}"))}
    said.pop("option")
    parameters = inspect.signature(recipe).parameters
    assert said == {key: json.dumps(parameters[key].default) for key in known_options(recipe, reserved=("setting",))}


def test_run_folder_fields_are_those_that_a_run_writes(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.app.simulate import simulate

    monkeypatch.setenv("GOSSAMER_CACHE", str(beside / "cache"))
    (beside / "text.txt").write_text(page("clock.md"), encoding="utf-8")
    sets = [
        "method.name=gasloc", "method.topology=ring", "fleet.name=uniform-2", "run.rounds=2", "run.device=cpu", "checkpoint.every=1",
        "plan.steps=1", "plan.batch=1", "plan.sequence=16", "data.source=text.txt", "data.tokenizer=bytes", "eval.sequences=1",
        "model.config={model_type='llama', hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1}",
    ]  # fmt: skip
    folder = simulate(resolve(configuration.load(sets=sets)), beside / "run", quiet=True)
    text = page("run-folder.md")

    def fields(part: str) -> set[str]:
        return {name for cells in rows(part) for name in re.findall(r"`([a-z_0-9]+)`", cells[0])}

    for file in (p.name for p in folder.path.iterdir()):
        assert file in text, f"a run writes {file}"
    metrics, evaluations = section(text, "## metrics.jsonl").split('`kind = "plan"`')[0].split('`kind = "eval"`')
    records = folder.read_lines("metrics.jsonl")
    assert {k for r in records if r["kind"] == "round" for k in r} - {"kind"} == fields(metrics)
    assert {k for r in records if r["kind"] == "eval" for k in r} - {"kind"} == fields(evaluations)
    assert {k for r in folder.read_lines("trace.jsonl") for k in r} == fields(section(text, "## trace.jsonl"))
    kinds = {r["kind"] for r in folder.read_lines("trace.jsonl")}
    assert all(f"`{kind}`" in section(text, "## trace.jsonl") for kind in kinds)
    assert set(json.loads((folder.path / "summary.json").read_text())) == fields(section(text, "## summary.json"))
    assert set(folder.facts()) == fields(section(text, "## facts.json"))
    checkpoints = section(text, "## checkpoints/")
    manifest = json.loads((folder.checkpoints / "round-000002" / "manifest.json").read_text())
    assert all(f"`{key}`" in checkpoints for key in manifest)
    files = {p.name for p in (folder.checkpoints / "round-000002").rglob("*") if p.is_file()}
    assert files <= set(re.findall(r"[\w-]+\.\w+", checkpoints))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links_files_tests_and_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"a link to {target}"
    for file in re.findall(r"`((?:gossamer|tests|configs|docs|bench)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), f"there is no {file}"
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"there is no {name}"
    for name in re.findall(r"`(gossamer(?:\.\w+)+)`", text):
        assert exists(name), f"there is no {name}"


def exists(dotted: str) -> bool:
    """Whether a module, or a name in one, has this dotted name."""
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), name)
    return True


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulat"],
        ["train", "--worker-count", "2"],
        ["trace", "runs/a"],
        ["compare", "configs/demo.toml", "--nout", "x"],
        ["wan", "ca", "isue", "lyon"],
        ["wan", "ca", "issue", "lyon", "--hots", "x"],
    ],
)
def test_a_wrong_command_is_noticed(arguments: list[str]) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR)):
        check_command(arguments)


def test_commands_are_found() -> None:
    shell = "PYTHONPATH=. gossamer train --workers 2  # note\ntorchrun x -m gossamer train a.toml"
    text = f"Run `gossamer plan configs/demo.toml`.\n\n```sh\n{shell}\n```\n"
    assert list(commands(text)) == [["train", "--workers", "2"], ["train", "a.toml"], ["plan", "configs/demo.toml"]]

"""What is installed: data files, extras, versions, completion. Read from the files; nothing is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gossamer import __version__, cli

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def test_a_wheel_has_every_file_that_is_no_module() -> None:
    package = ROOT / "gossamer"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["gossamer"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    there = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".md") and "__pycache__" not in p.parts}
    assert there <= packed and package / "py.typed" in packed, there - packed
    assert all(list(package.glob(pattern)) for pattern in patterns), "a pattern without files"


def test_versions_are_one() -> None:
    assert PROJECT["project"]["version"] == __version__
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert next(head for head in heads if head != "Unreleased") == __version__


def needs(extra: str) -> set[str]:
    """The projects that an extra asks for, those of the extras in it too."""
    found: set[str] = set()
    for line in EXTRAS[extra]:
        if line.startswith("gossamer["):
            found |= {name for inner in re.findall(r"[\w-]+", line.removeprefix("gossamer")) for name in needs(inner)}
        else:
            found.add(re.split(r"[\[<>=!~ ;]", line)[0].lower().replace("_", "-"))
    return found


def test_all_is_every_extra_for_users_and_each_is_explained() -> None:
    told = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    for extra in EXTRAS.keys() - {"dev", "all"}:
        assert needs(extra) <= needs("all"), extra
        assert f"gossamer[{extra}]" in told, f"docs/quick-start.md does not name {extra}"


def test_messages_and_pages_name_extras_that_there_are() -> None:
    texts = [p.read_text(encoding="utf-8") for folder in ("gossamer", "docs") for p in (ROOT / folder).rglob("*.[pm][yd]")]
    named = {extra for text in texts for one in re.findall(r"gossamer\[([\w,-]+)\]", text) for extra in one.split(",")}
    assert {"wan", "loggers"} <= named <= set(EXTRAS)


def test_constraints_pin_what_the_tests_and_the_site_install() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+", line) for line in lines) and lines == sorted(lines)
    pinned = {line.split("==")[0] for line in lines}
    base = {re.split(r"[<>= ;\[]", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
    assert base | needs("dev") | needs("docs") <= pinned, (base | needs("dev") | needs("docs")) - pinned


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_a_shell(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert cli.main(["--show-completion", shell]) == 0
    assert "_GOSSAMER_COMPLETE" in capsys.readouterr().out


def test_commands_and_options_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, wanted in (("gossamer sim", "simulate"), ("gossamer train --wor", "--workers")):
        monkeypatch.setenv("_GOSSAMER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert cli.main([]) == 0
        assert capsys.readouterr().out.split() == [wanted]

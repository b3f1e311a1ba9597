"""What nobody means to give: every case ends in one message and the right exit code, never in a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_runs import corpus, flags, settings

from gossamer import cli
from gossamer.app import settings as S
from gossamer.app.folder import JsonLines, RunFolder, check_new, default_path, write_atomically
from gossamer.app.grids.compare import folder_names
from gossamer.app.lock import alone_in
from gossamer.core import method
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train import corpus as C
from gossamer.train import data, tokenizer
from gossamer.train.model import meta_model

HUGE = "9" * 400
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc, /dev/full and file names of any bytes are Linux's")
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
FLEET = """
[[sites]]
name = "a"
region = "x"
gpu = "A100 80GB"
workers = {workers}
up_mbps = {up_mbps}
down_mbps = 100
step_s = [[100, {step_s}]]
[[sites]]
name = "b"
region = "y"
gpu = "A100 80GB"
up_mbps = 100
down_mbps = 100
[[links]]
between = ["x", "y"]
rate_mbps = 100
rtt_ms = 10
connections = {connections}
"""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("GOSSAMER_DEBUG", raising=False)
        yield


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that can be resumed: all but its summary is there."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    assert cli.main(["simulate", *flags(settings(text, fleet__name='"uniform-1"', run__rounds=1)), "--out", str(out)]) == 0
    (out / "summary.json").unlink()
    return out


def said(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(arguments) == code
    message = capsys.readouterr().err
    assert message.startswith("gossamer: ") and "Traceback" not in message
    for word in words:
        assert word in message, message
    return message


# Settings

SETTINGS = {
    "a name that is no text": ("name=\udcff", ["name", "UTF-8"]),
    "a folder that is no text": ("data.source=\udcff", ["data.source", "UTF-8"]),
    "an option that is no text": ("method.form=\udcff", ["method.form", "UTF-8"]),
    "a list with what is no text": ('method.betas=["\udcff"]', ["method.betas.1", "UTF-8"]),
    "400 digits": (f"plan.steps={HUGE}", ["plan.steps", "at most 256"]),
    "5000 hexadecimal digits": (f"plan.steps=0x{'f' * 5000}", ["plan.steps", "20000 bits"]),
    "tables in tables": (".".join("a" * 3000) + "=1", ["too many"]),
    "more text than there is": ("data.limit_mb=1e303", ["data.limit_mb", "at most"]),
    "more windows than memory": (f"eval.sequences={2**62}", ["eval.sequences", "at most"]),
    "less than a byte": ("data.limit_mb=1e-9", ["data.limit_mb", "at least"]),
    "no source": ('data.source=""', ["data.source", '"."']),
    "more rounds than tags": ("run.rounds=1000000000", ["run.rounds", "268435455"]),
    "more tokens than tags": (f"run.tokens={2**62}", ["rounds", "268435455"]),
    "more steps than tags": ("run.rounds=200000000", ["rounds", "268435455"], "method.name=ddp"),
    "a system call": ("method.name=os.system", ["os.system", "setting"]),
    "a built-in": ("method.name=builtins.len", ["builtins.len", "setting"]),
    "a function of nothing": ("method.name=os.getcwd", ["os.getcwd", "setting"]),
    "a function without a signature": ("method.name=builtins.int", ["builtins.int"]),
    "a class": ("method.name=gossamer.core.method.Method", ["Method", "setting"]),
    "dots": ("method.name=..x", ["..x", "module.function"]),
    "a million million workers": ("fleet.name=uniform-1000000000000", ["100,000"]),
    "a few more workers than fit": ("fleet.name=uniform-100001", ["100001", "100000"]),
    "5000 digits of workers": (f"fleet.name=uniform-{'1' * 5000}", ["100,000"]),
    "too many in its key": ("fleet.workers=100001", ["fleet.workers", "100000"], "fleet.name=uniform"),
    "a fleet with a NUL": ('fleet.name="a\\u0000.toml"', ["a\\x00.toml", "cannot be read"]),
    "a fleet with a long name": (f'fleet.name="{"a" * 300}.toml"', ["cannot be read"]),
    "a model with a long name": (f'model.config="{"a" * 300}"', ["model configuration", "cannot be read"]),
    "the home of nobody": ('model.config="~nobody-of-this-name/x"', ["nobody-of-this-name"]),
    "a width below 0": (f"model.config={{{', '.join(f'{k} = {json.dumps(v)}' for k, v in {**LLAMA, 'hidden_size': -4}.items())}}}", ["-4"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile, words, *before = SETTINGS[case]
    message = said(["plan", *flags([*before, hostile])], 2, capsys, *words)  # type: ignore[list-item]
    assert len(message) < 1000


@pytest.mark.parametrize("source", ["a\\u0000b", "~nobody-of-this-name/x", "a" * 300])
def test_a_source_that_cannot_be(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    said(["simulate", "--set", f'data.source="{source}"', "--out", str(out)], 2, capsys, "the corpus", "data.source")
    assert not out.exists()


def test_the_two_limits_on_rounds_are_one() -> None:
    assert S.MAX_ROUNDS == method.MAX_ROUNDS


def test_a_recipe_that_returns_no_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hostile_recipes.py").write_text(
        "from gossamer.recipes import Setting\n"
        "def three(setting): return 3\n"
        "def typed(s: Setting, *, alpha: float = 1.0): return 3\n"
        "def two(setting, other): return 3\n"
        "def keyword(*, setting): return 3\n"
    )
    (tmp_path / "hostile_module.py").write_text("1 / 0\n")
    try:
        for name in ("three", "typed"):
            said(["plan", "--set", f"method.name=hostile_recipes.{name}"], 2, capsys, name, "returned int", "Method")
        for name in ("two", "keyword"):
            said(["plan", "--set", f"method.name=hostile_recipes.{name}"], 2, capsys, name, "setting")
        said(["plan", "--set", "method.name=hostile_module.x"], 2, capsys, "cannot be imported", "ZeroDivisionError")
    finally:
        sys.modules.pop("hostile_recipes", None)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"workers": 10**12}, ["1000000000001 workers", "100000"]),
        ({"workers": "0x" + "f" * 5000}, ["workers", "far too long"]),
        ({"workers": "1" * 5000}, ["not TOML"]),
        ({"workers": "[" * 5000}, ["not TOML"]),
        ({"up_mbps": HUGE}, ["up_mbps", "1e+15"]),
        ({"up_mbps": "1e-300"}, ["up_mbps", "1e-12"]),
        ({"connections": HUGE}, ["connections", "1e+15"]),
        ({"step_s": "5e-324"}, ["step_s", "1e-12"]),
        ({"step_s": "nan"}, ["step_s"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_fleets(change: dict[str, object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"workers": 1, "up_mbps": 100, "step_s": 0.1, "connections": 1}
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(**values))
    assert cli.main(["plan", "--set", f'fleet.name="{path}"']) == 0
    path.write_text(FLEET.format(**values | change))
    assert len(said(["plan", "--set", f'fleet.name="{path}"'], 2, capsys, "fleet.toml", *words)) < 1000


def test_the_ends_of_a_fleets_range_still_give_times(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    for up, step in ((1e-12, 1e15), (1e15, 1e-12)):
        path.write_text(FLEET.format(workers=1, up_mbps=up, step_s=step, connections=10**15))
        assert cli.main(["plan", "--set", f'fleet.name="{path}"']) == 0


@pytest.mark.parametrize("change", [
    {"hidden_size": -4}, {"hidden_size": "a"}, {"hidden_size": 0}, {"hidden_size": 2**62}, {"num_attention_heads": 0},
    {"hidden_act": "zz"}, {"pad_token_id": 10**9}, {"rope_parameters": [1]},
], ids=str)  # fmt: skip
def test_models(change: dict[str, object]) -> None:
    meta_model(LLAMA, 300)
    with pytest.raises(BadInput, match="'llama' model"):
        meta_model({**LLAMA, **change}, 300)


# Text


def test_text_that_is_no_text(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "text")
    (folder / "a.jsonl").write_text('{"text": "half a pair: \\ud800, and words after it"}\n' * 20)
    if sys.platform == "linux":
        (folder / os.fsdecode(b"\xff\xfe.txt")).write_text("a file whose name is no text\n" * 20)
    for kind in ("bytes", "bpe"):
        assert len(data.load(folder, sequence=8, tokenizer=kind, vocab_size=300).train) > 8
    assert bytes(next(tokenizer.Bytes().encode(["\ud800!"])).astype(np.uint8)) == b"?!"


@linux
def test_the_hash_of_a_corpus_tells_names_apart_that_are_no_text(tmp_path: Path) -> None:
    hashes = []
    for name in (b"\xff.txt", b"\xfe.txt"):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        (folder / os.fsdecode(name)).write_text("one line and another\n" * 20)
        hashes.append(C.find(folder).content_hash)
    assert len(set(hashes)) == 2


def test_a_line_of_brackets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n" + "[" * 100_000 + "\n")
    with pytest.raises(BadInput, match=r"a\.jsonl, line 1"):
        list(C.documents(C.find(tmp_path).train))


@pytest.mark.parametrize("about", ["[]", "1", "{", "[" * 100_000, '{"format": 1, "tokens": []}', "vocab_size", "tokens"])
def test_a_damaged_cache_is_made_again(about: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path))
    first = data.load(text, sequence=8, tokenizer="bytes")
    (path,) = tmp_path.rglob("about.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {about: "x"}) if about.isidentifier() else about)
    again = data.load(text, sequence=8, tokenizer="bytes")
    assert again.content_hash == first.content_hash and again.vocab_size == 257
    assert json.loads(path.read_text())["format"] == 1


def test_messages_name_keys_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a long first line " * 50}) + "\n")
    with pytest.raises(BadInput, match=r"data\.limit_mb"):
        C.find(tmp_path, limit_bytes=5)
    with pytest.raises(BadInput, match=r"data\.limit_mb, or shorten plan\.sequence"):
        data.load(corpus(tmp_path / "text"), sequence=10**6, tokenizer="bytes")


# Folders


@pytest.mark.parametrize("out", ["file/x", "file/x/y", "file", "a" * 300, "a/" + "b" * 300])
def test_a_run_folder_that_cannot_be_made(out: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("precious")
    said(["simulate", *flags(settings(text)), "--out", str(tmp_path / out)], 2, capsys, "the run folder", "--out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "precious"


@linux
def test_a_folder_where_nobody_can_write(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(["simulate", *flags(settings(text)), "--out", "/proc/no-such-run"], 2, capsys, "/proc/no-such-run", "--out")
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(RunFailed, match=r"/dev/full cannot be written \(No space left"):
        lines.add({"kind": "round"})
    lines.close()


def test_a_folder_in_which_another_process_trains(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    with alone_in(run):
        said(["simulate", "--resume", str(run)], 2, capsys, "another process trains", str(run))
    assert not (run / ".lock").exists()


def test_a_nul_in_the_folder(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(["simulate", *flags(settings(text, run__out='"a\\u0000b"'))], 2, capsys, "the run folder", "--out")


@linux
def test_a_full_disk_fails_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(self: JsonLines, path: Path, every: int = 1) -> None:
        self._path, self._every, self._waiting, self._left = path, every, [], b""
        self._file = open("/dev/full" if path.name == "metrics.jsonl" else path, "ab", buffering=0)  # noqa: SIM115

    monkeypatch.setattr(JsonLines, "__init__", full)
    sets = settings(text, fleet__name='"uniform-1"', run__rounds=1)
    said(["simulate", *flags(sets), "--out", str(tmp_path / "run")], 1, capsys, "metrics.jsonl cannot be written", "No space left")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", _raise(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunFailed, match=r"summary\.json cannot be written \(No space left"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"] and path.read_text() == "old"


def test_long_titles_fit_into_file_names() -> None:
    for title in ("a" * 300, "\U0001d504" * 300, "\udcff" * 300):
        assert len(os.fsencode(default_path(title).name)) <= 255
        check_new(default_path(title))


def test_folders_of_a_comparison_stay_in_it() -> None:
    class Named:
        def __init__(self, title: str) -> None:
            self.title = title

    titles = ["..", ".", "...", "../../x", "a/b", "report.html", "v1.5", "", "a" * 300, "a" * 301, ".hidden"]
    names = folder_names([Named(title) for title in titles])  # type: ignore[misc]
    assert len(set(names)) == len(names) and "report.html" not in names and "v1.5" in names
    for name in names:
        assert name and "/" not in name and not name.startswith(".") and len(os.fsencode(name)) <= 255


# Resuming


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "facts.json": [
        Path.unlink, _text("{"), _text("[]"), _text("{}"), _text('{"world": 1}'), _text("[" * 100_000),
        lambda path: path.write_bytes(b"\xff"), _folder,
    ],
    "metrics.jsonl": [
        _text('{"kind":1}\n'), _text('{"kind":"round"}\n'), _text('{"kind":"round","round":1}\n'), _text('{"kind":"eval","round":"1"}\n'),
        _text("[]\n"), _text("[]"), _text("[" * 100_000 + "\n"), _text("{\n{}\n"), lambda path: path.write_bytes(b"\xff\xfe\x80"), _folder,
    ],
    "trace.jsonl": [_text("[]\n"), lambda path: path.write_bytes(b"\xff\n"), _folder],
}  # fmt: skip


@pytest.mark.parametrize("name, k", [(name, k) for name, ways in DAMAGE.items() for k in range(len(ways))])
def test_resuming_a_damaged_folder(name: str, k: int, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    DAMAGE[name][k](run / name)
    message = said(["simulate", "--resume", str(run)], 2, capsys, str(run / name), "new run")
    assert len(message) < 1000
    assert not (run / "summary.json").exists()


def test_a_torn_last_line_is_no_damage(stopped: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    whole = (run / "metrics.jsonl").read_bytes()
    for torn in (b'{"kind":"rou', b'{"kind":"round","loss":', b"\0\0\0\0", b""):
        (run / "metrics.jsonl").write_bytes(whole + torn)
        assert len(RunFolder(run).read_lines("metrics.jsonl")) == whole.count(b"\n")
    RunFolder(run).cut("metrics.jsonl", 1)
    assert all(json.loads(line)["round"] <= 1 for line in (run / "metrics.jsonl").read_text().splitlines())
    assert cli.main(["simulate", "--resume", str(run)]) == 0


def test_no_checkpoint_to_resume_from(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    shutil.rmtree(run / "checkpoints")
    said(["simulate", "--resume", str(run)], 2, capsys, "no whole checkpoint")


def test_a_long_name_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("simulate", "train"):
        said([command, "--resume", "a" * 300], 2, capsys, "run folder")


# The last resort


def _raise(error: BaseException) -> Callable[..., None]:
    def act(*_: object, **__: object) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "gossamer: a/b: No space left on device\n"),
        (OSError(errno.EIO, "Input/output error"), "gossamer: Input/output error\n"),
        (PermissionError(errno.EACCES, "Permission denied", b"\xff"), "gossamer: \\udcff: Permission denied\n"),
    ],
    ids=["named", "nameless", "no text"],
)
def test_what_the_system_says(error: OSError, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gossamer.app.commands.plan", _raise(error))
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == words
    monkeypatch.setenv("GOSSAMER_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["plan"])

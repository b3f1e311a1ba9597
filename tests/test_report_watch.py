"""`gossamer watch` in a terminal, and what its page answers."""

from __future__ import annotations

import http.client
import io
import json
import os
import shlex
import socket
import struct
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from report_folders import make_plan, make_run, read_lines, write_lines
from rich.console import Console

from gossamer.app.folder import RunFolder
from gossamer.core.errors import BadInput
from gossamer.report import watch as command
from gossamer.report.live import load, version
from gossamer.report.serve import Live, Server
from gossamer.report.standing import Watcher
from gossamer.report.words import goes_on


def shown(folder: Path, width: int = 100, **changes: bool) -> str:
    out = io.StringIO()
    command.watch(folder, Console(file=out, width=width, emoji=False, highlight=False), once=True, **changes)
    return out.getvalue()


def halfway(folder: Path) -> Path:
    """Six rounds of twelve, worker 3 three of them."""
    made = make_plan(make_run(folder, rounds=6), rounds=12)
    (made / "summary.json").unlink()
    for name in ("metrics.jsonl", "trace.jsonl"):
        kept = [r | {"round": r["round"] + 1} for r in read_lines(made / name) if r["worker"] != 3 or r["round"] < 3]
        write_lines(made / name, kept)
    return made


def test_a_terminal_tells_rounds_losses_and_waits(tmp_path: Path) -> None:
    folder = halfway(tmp_path / "a")
    for width in (60, 100, 140):
        text = shown(folder, width)
        assert "round 3 of 12" in text
        assert "3 behind" in text
        assert "L40S" in text and "A100 " in text
        assert max(map(len, text.splitlines())) <= width
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"round","wor')
    assert "round 3 of 12" in shown(folder)
    assert "finished" in shown(make_run(tmp_path / "b", rounds=2))
    with pytest.raises(BadInput, match=r"leave one of the two out"):
        command.watch(folder, Console(file=io.StringIO()), port=0, once=True)


def test_a_pace_is_what_is_seen(tmp_path: Path) -> None:
    folder = halfway(tmp_path / "a")
    watcher = Watcher(now_s=1000.0)
    os.utime(folder / "config.toml", (100.0, 100.0))
    os.utime(folder / "metrics.jsonl", (160.0, 160.0))
    first = watcher.look(load(folder))
    assert (first.round_s, first.left_s) == (20.0, 180.0), "by the times of its files"
    more = [r for r in read_lines(folder / "metrics.jsonl") if r["worker"] == 0]
    late = [r | {"worker": 3} for r in more if r["kind"] == "round" and r["round"] in (4, 5)]
    write_lines(folder / "metrics.jsonl", read_lines(folder / "metrics.jsonl") + late)
    watcher = _later(watcher, 1060.0)
    assert watcher.look(load(folder)).round_s == 30.0, "two rounds in sixty seconds"


def test_a_site_knows_of_itself_alone(tmp_path: Path) -> None:
    folder = halfway(tmp_path / "a")
    (folder / "facts.json").write_text(json.dumps({"world": "wan", "site": "lyon", "seat": 2}))
    own = folder / "workers" / "2"
    own.mkdir(parents=True)
    for name in ("metrics.jsonl", "trace.jsonl"):
        write_lines(own / name, [r for r in read_lines(folder / name) if r["worker"] == 2])
        (folder / name).unlink()
    last_s = (own / "metrics.jsonl").stat().st_mtime
    states = [w.state for w in Watcher(now_s=last_s + 5.0).look(load(folder)).workers]
    assert states == ["no record here", "no record here", "running", "no record here"]
    quiet = Watcher(now_s=last_s + 3600.0).look(load(folder)).workers[2]
    assert quiet.state == "silent for 60 min"


def test_a_site_knows_who_is_in_its_session(tmp_path: Path) -> None:
    """The record of a session is in the folder of its lowest site alone."""
    folder = halfway(tmp_path / "a")
    (folder / "facts.json").write_text(json.dumps({"world": "wan", "site": "lyon", "seat": 2}))
    own = folder / "workers" / "2"
    own.mkdir(parents=True)
    (folder / "trace.jsonl").unlink()
    records = [r for r in read_lines(folder / "metrics.jsonl") if r["worker"] == 2]
    (folder / "metrics.jsonl").unlink()
    gone = {"kind": "members", "round": 2, "worker": 2, "time_s": 9.0, "absent": [0, 1], "session": 2}
    write_lines(own / "metrics.jsonl", [*records, gone])

    def states() -> list[str]:
        looked = Watcher(now_s=(own / "metrics.jsonl").stat().st_mtime).look(load(folder))
        return [w.state for w in looked.workers]

    def session(number: int, round: int, *members: int) -> dict[str, object]:
        return {"number": number, "round": round, "members": list(members)}

    assert states() == ["absent", "absent", "running", "no record here"]
    mark = version(folder)
    (folder / "sessions.json").write_text(json.dumps({"bound": [session(3, 4, 0, 2), session(2, 2, 2, 3)]}))
    assert version(folder) != mark, "what is shown has changed"
    assert states() == ["no record here", "absent", "running", "absent"], "worker 0 is back, and worker 3 is gone"
    (first, *_), text = [line for line in shown(folder, 140).splitlines() if "no record here" in line], shown(folder, 140)
    assert "0.0" not in first and text.count("absent") == 2, "nothing is known of its bytes"
    (folder / "sessions.json").write_text(json.dumps({"bound": [session(2, 1, 0, 1, 2, 3)]}))
    assert states() == ["absent", "absent", "running", "no record here"], "a newer record counts"
    (folder / "sessions.json").write_text("{")
    assert states() == ["absent", "absent", "running", "no record here"]


def stopped(folder: Path, checkpoint: int | None, command: str = "gossamer train --workers 4 --resume") -> Path:
    RunFolder(folder).was_stopped(checkpoint, command)
    return folder


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (3, "stopped after round 3; go on with: gossamer train --workers 4 --resume {}"),
        (2, "stopped after round 3; go on from the checkpoint of round 2 with: gossamer train --workers 4 --resume {}"),
        (None, "stopped after round 3, before its first checkpoint: begin it again, with another --out"),
    ],
)
def test_a_run_that_was_stopped_says_so_and_how_it_goes_on(tmp_path: Path, checkpoint: int | None, words: str) -> None:
    folder = halfway(tmp_path / "a run")
    going = version(folder)
    assert "goes on" in shown(folder) and " left" in shown(folder)
    text, words = shown(stopped(folder, checkpoint)), words.format(shlex.quote(str(folder)))
    assert "  stopped, " in text and words.replace(" ", "") in "".join(text.split()), "however it is wrapped"
    assert "goes on" not in text and " left" not in text and "running" not in text and "behind" not in text
    assert {w.state for w in Watcher(now_s=1e12).look(load(folder)).workers} == {"stopped"}
    assert version(folder) != going
    assert f"it was {words}" in goes_on([load(folder)])
    RunFolder(folder).goes_on()
    assert version(folder) == going and "goes on" in shown(folder)
    stopped(folder, checkpoint)
    (folder / "stopped.json").write_text('{"checkpoint": "x"')
    assert "goes on" in shown(folder), "what cannot be read says nothing"


def test_a_run_that_is_still_loading_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    whole, slept = halfway(tmp_path / "b"), []
    for name in ("metrics.jsonl", "trace.jsonl"):
        (whole / name).unlink()
    out = io.StringIO()

    def sleep(seconds: float) -> None:
        """It prints first, then makes its folder, and then trains to its end."""
        slept.append(seconds)
        if len(slept) == 1:
            (folder / "logs").mkdir(parents=True)
        if len(slept) == 3:
            os.rename(whole / "config.toml", folder / "config.toml")
        if len(slept) == 4:
            assert "no round is completed yet" in shown(folder)
            os.rename(whole / "plan.json", folder / "plan.json")
        if len(slept) == 5:
            assert "no round is completed yet" in shown(folder) and "starting" in shown(folder)
            make_run(folder, rounds=2)
        assert len(slept) < 7

    command.watch(folder, Console(file=out, width=140), sleep=sleep)
    told = out.getvalue()
    assert "".join(told.split()).count(f"no run in {folder} yet: one that was just started is still loading".replace(" ", "")) == 1
    assert "finished" in told
    with pytest.raises(BadInput, match=r"is not a folder; a run that was just started is still loading"):
        shown(tmp_path / "c")
    slept.clear()
    (tmp_path / "d").mkdir()
    with pytest.raises(BadInput, match=r"it has no config\.toml; a run that was just started is still loading"):
        command.watch(tmp_path / "d", Console(file=io.StringIO()), sleep=lambda seconds: slept.append(seconds))
    assert sum(slept) == command.PATIENCE_S, "it is not waited for without end"
    (tmp_path / "d" / "file").touch()
    with pytest.raises(BadInput, match=r"it has no config\.toml"):
        command.watch(tmp_path / "d", Console(file=io.StringIO()), sleep=lambda seconds: pytest.fail("it is something else"))


def _later(watcher: Watcher, now_s: float) -> Watcher:
    watcher._fixed_s = now_s
    return watcher


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    folder = halfway(tmp_path / "a")
    whole = make_run(tmp_path / "b", rounds=6)
    slept, metrics = [], (folder / "metrics.jsonl").read_bytes()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            (folder / "metrics.jsonl").write_bytes(b"what is written just now\n" + metrics)
        if len(slept) == 2:
            (folder / "metrics.jsonl").write_bytes(metrics)
            os.replace(whole / "summary.json", folder / "summary.json")
        assert len(slept) < 5

    out = io.StringIO()
    command.watch(folder, Console(file=out, width=100), sleep=sleep)
    assert "finished" in out.getvalue()
    assert "Ctrl-C ends" in out.getvalue() and "not read" not in out.getvalue(), "it could be read again"


def ask(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_a_page_is_made_when_files_have_changed_and_only_then(tmp_path: Path) -> None:
    folder = halfway(tmp_path / "a")
    made: list[str] = []

    def make(path: Path, mark: str) -> str:
        load(path)
        made.append(mark)
        return f"page {len(made)}"

    server = Server(Live(folder, make))
    try:
        assert ask(server, "/") == ask(server, "/") == (200, "page 1")
        assert ask(server, "/version") == (200, made[0])
        (folder / "metrics.jsonl").write_text("broken\n{}\n")
        server_live = Live(folder, make)
        assert "damaged" in server_live.page()
        assert [ask(server, path)[0] for path in ("/../etc/passwd", "/metrics.jsonl", "/version?x")] == [404, 404, 404]
        assert ask(server, "/", host="evil.example:80")[0] == 403
    finally:
        server.close()
    with pytest.raises(BadInput, match=r"cannot be had"):
        Server(Live(folder, make), 70_000)


def test_who_asks_and_goes_leaves_no_word_in_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(Live(halfway(tmp_path / "a"), lambda path, mark: "page" * 100_000))
    place = urlsplit(server.url)
    at_once = struct.pack("ii", 1, 0)  # closed with a reset, as by a browser that is killed
    try:
        for request in (b"GET /", b"GET / HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n", b"GET / HTTP/1.0\r\nHost: evil.example:1\r\n\r\n"):
            for _ in range(5):
                with socket.create_connection((place.hostname, place.port)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                    connection.sendall(request)
        assert ask(server, "/")[0] == 200
        begin_s = time.monotonic()
        while any("process_request_thread" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < begin_s + 30.0
            time.sleep(0.01)
    finally:
        server.close()
    assert capfd.readouterr().err == ""

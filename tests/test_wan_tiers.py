"""Where servers are among sites, the same from what all have said; and what a server holds between two messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_layout, toy_start

from gossamer.app.config import load
from gossamer.app.job import Job, resolve
from gossamer.app.wan.tiers import Word, agree
from gossamer.core.errors import RunFailed
from gossamer.core.tiers import hosts
from gossamer.core.tree import digest
from gossamer.train import checkpoint
from gossamer.wan.roster.records import Session
from gossamer.worker.effects import RecvAny, Send, Tag
from gossamer.worker.packet import DONE
from gossamer.worker.seat import Said, Seat
from gossamer.worker.server import first_of, server
from gossamer.worker.server_state import ServerState

EAST, WEST, TOP = 4, 5, 6


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Workers 0 and 2 in the east, 1 and 3 in the west, where links are better."""
    path = tmp_path_factory.mktemp("fleet") / "four.toml"
    site = '[[sites]]\nname = "{}"\nregion = "{}"\ngpu = "H100 80GB"\nup_mbps = {}\ndown_mbps = 900\n'
    text = "".join(
        site.format(name, region, up) for name, region, up in (("a", "e", 100), ("b", "w", 900), ("c", "e", 900), ("d", "w", 900))
    )
    text += "".join(f'[[links]]\nbetween = ["{a}", "{b}"]\nrate_mbps = 900\nrtt_ms = 10\n' for a, b in (("e", "e"), ("e", "w"), ("w", "w")))
    path.write_text(text)
    return resolve(load([], ["method.name=halos", f"fleet.name={path}", "run.rounds=4"]))


def session(members: tuple[int, ...], donors: tuple[int, ...] = ()) -> Session:
    return Session(number=7, generation=0, epoch=1, round=3, members=members, donors=donors or members, digest=None, by=None)


def words(members: tuple[int, ...], was: int = 6, deaf: tuple[int, ...] = (), **holds: dict[int, int]) -> dict[int, Word]:
    found = {j: Word(was, j not in deaf, holds.get(f"at{j}", {}), {}) for j in members}
    return {j: Word.read(word.text()) for j, word in found.items()}


def test_at_the_start_servers_are_where_the_simulator_has_them(job: Job) -> None:
    everybody = (0, 1, 2, 3)
    assert job.method.tiers is not None
    places = agree(job, session(everybody), words(everybody, was=0))
    assert places.at == dict(zip((EAST, WEST, TOP), hosts(job.fleet, job.method.tiers)[4:], strict=True))
    assert not places.kept


def test_a_server_stays_where_it_is_and_else_begins_beside_the_first_who_can_be_reached(job: Job) -> None:
    everybody = (0, 1, 2, 3)
    places = agree(job, session(everybody), words(everybody, at2={EAST: 6}, at3={WEST: 6, TOP: 6}))
    assert places.at == {EAST: 2, WEST: 3, TOP: 3} and places.kept == {EAST, WEST, TOP}
    places = agree(job, session((0, 2, 3)), words((0, 2, 3), at2={EAST: 6}))
    assert places.at == {EAST: 2, WEST: 3, TOP: 0} and places.kept == {EAST}
    places = agree(job, session(everybody), words(everybody, at2={EAST: 5}, at3={WEST: 6}))
    assert places.at[EAST] == 0 and EAST not in places.kept, "one from before the last session is nobody's"
    places = agree(job, session(everybody), words(everybody, deaf=(0, 1, 3)))
    assert places.at == {EAST: 2, WEST: 2, TOP: 2}
    assert agree(job, session((0, 2)), words((0, 2))).at == {EAST: 0, TOP: 0}, "no worker, no server"
    with pytest.raises(RunFailed, match="none of the sites can be dialled"):
        agree(job, session(everybody), words(everybody, deaf=everybody))


def test_what_donors_say_counts_for_the_session_before(job: Job) -> None:
    said = words((0, 1)) | {3: Word(2, True, {TOP: 2}, {})}
    places = agree(job, session((0, 1, 3), donors=(0, 1)), said)
    assert places.was == 6 and not places.kept


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"was": 1, "listens": true, "holds": [], "taken": {}}'])
def test_words_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RunFailed, match="run one release on all sites"):
        Word.read(text)


class Driven:
    """A server, driven by hand."""

    def __init__(self, seat: Seat, held: ServerState, since: int) -> None:
        self.seat, self.program, self.sent = seat, server(seat, held, since=since), []  # type: ignore[var-annotated]
        self.until_it_waits(None)

    def until_it_waits(self, reply: Any) -> None:
        effect = self.program.send(reply)
        while not isinstance(effect, RecvAny):
            if isinstance(effect, Send):
                self.sent.append(effect.to[0])
            effect = self.program.send(None)

    def hears(self, frm: int, value: float | None, round: int, flags: int = 0) -> None:
        who = Seat(frm, self.seat.method, toy_layout(), run_id=7)
        x = toy_start()
        tree = {k: torch.full_like(v, value) for k, v in x.items()} if value is not None else {}
        said = Said(round, 1, 0 if round else digest(x), flags)
        self.until_it_waits((frm, who.pack(tree, toy_layout() if tree else (), Tag.TIER, said)))


def test_what_was_taken_in_is_not_taken_in_again_and_a_report_without_an_answer_comes_again(tmp_path: Path) -> None:
    from test_halos_real import method

    m = method(1, 9, regions=(0,), report_every=2, local_momentum=0.5, local_delay=3)
    seat = Seat(1, m, toy_layout(), run_id=7)
    held = first_of(seat, toy_start())
    first = Driven(seat, held, 0)
    first.hears(0, 1.0, 0)
    first.hears(0, 2.0, 1)
    assert first.sent == [0, 2, 0], "an answer, then a report and an answer"
    before, unmerged = digest(held.x), held.unmerged
    state, extra = held.pack()
    sha = checkpoint.write_part(tmp_path, 1, 1, state, {}, extra)
    checkpoint.close(tmp_path, 1, 0, {1: sha})
    part = checkpoint.read_part(tmp_path, 1, 1)
    again = ServerState.unpack(part.state, part.extra)
    assert digest(again.x) == before and again.unmerged == unmerged == 2 and again.taken == {0: 2} and again.memory.arrivals == 2
    second = Driven(seat, again, 1)  # its worker goes on from block 1, which was taken in
    second.hears(0, 2.0, 1)
    assert digest(again.x) == before and again.unmerged == 2, "not twice"
    assert second.sent == [2, 0], "the report comes again, and the worker has its answer"
    second.hears(0, 3.0, 2)
    assert digest(again.x) != before and again.unmerged == 3 and again.taken == {0: 3}
    first.hears(0, 3.0, 2)
    assert digest(again.x) == digest(held.x), "as if nothing had happened, momentum included"


def test_who_stops_before_the_end_leaves_what_is_not_reported(tmp_path: Path) -> None:
    from test_halos_real import method

    for rounds, reports in ((9, 0), (1, 1)):
        m = method(1, rounds, regions=(0,), report_every=5)
        seat = Seat(1, m, toy_layout(), run_id=7)
        held = first_of(seat, toy_start())
        driven = Driven(seat, held, 0)
        driven.hears(0, 1.0, 0)
        with pytest.raises(StopIteration):
            driven.hears(0, None, 1, DONE)
        assert (held.unmerged, held.reports) == (1 - reports, reports)
        assert (digest(held.merged) == digest(held.x)) == bool(reports)

"""gossamer.join with the state of a run that had come to its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from library_toys import ADAM, SMALL, User, same, users
from toy import ToyBody

import gossamer
from gossamer.core.plan import uniform
from gossamer.integrations.state import say_if_over
from gossamer.real import Group
from gossamer.recipes import diloco


def test_the_state_of_a_run_that_has_ended_has_nothing_to_go_on_with() -> None:
    method = diloco(SMALL)

    def first(group: Group) -> Any:
        user = User(group, method).steps(10_000)
        user.outer.close()
        return user.kept()

    kept = users(2, first)

    def second(group: Group) -> Any:
        user = User(group, method)
        user.outer.load_state_dict(kept[group.me]["outer"])
        assert user.outer.over and same(user.live, kept[group.me]["model"])
        record = user.steps(1).records[-1]
        assert record.over and not record.exchanged and not same(user.live, kept[group.me]["model"])
        assert user.outer.close() == (4, "dropped", 1, 0)
        return user.live

    assert all(same(live, saved["model"]) for live, saved in zip(users(2, second), kept, strict=True))


def test_who_begins_beside_the_state_of_a_run_that_has_ended_is_told() -> None:
    method = diloco(SMALL)

    def ended(group: Group) -> Any:
        user = User(group, method).steps(10_000)
        user.outer.close()
        return user.kept()["outer"]

    kept = users(2, ended)

    def mixed(group: Group) -> str:
        user = User(group, method)
        if group.me == 0:
            user.outer.load_state_dict(kept[0])
            with suppress(gossamer.PeerLost):  # the other may be gone before this one is
                user.outer.close()
            return ""
        with pytest.raises(gossamer.BadInput, match=r"worker 0: after round 4, worker 1: fresh") as found:
            user.steps(1)
        return str(found.value)

    assert "load on all of them the states of one round" in users(2, mixed)[1]


def test_a_trainer_that_goes_on_with_a_run_that_has_ended_says_so(caplog: pytest.LogCaptureFixture) -> None:
    method = diloco(replace(SMALL, plan=uniform(1, 3, 2, ToyBody.LENGTH)))
    body = ToyBody(0, ADAM)
    with gossamer.join(body.model, body.optimizer, method) as outer:
        say_if_over(outer)
        assert not caplog.messages
        while not outer.over:
            body.gradient(2)
            body.take()
            outer.step()
        kept = outer.state_dict()
    with gossamer.join(body.model, body.optimizer, method) as outer:
        outer.load_state_dict(kept)
        say_if_over(outer)
    assert "end after round 4 when this checkpoint was written: nothing is trained" in caplog.messages[0]

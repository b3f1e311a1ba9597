"""Programs over gRPC have the bits and bytes of a world without a clock, which are those of the simulator and of gloo."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from lockstep import Lockstep
from net_toys import Hooks
from toy import ToyBody, toy_layout, toy_start
from wan_toys import in_sites

from gossamer.core.errors import RunFailed
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.tree import layout_hash
from gossamer.real import Group, run
from gossamer.recipes import Setting, diloco, gasloc, geomesh
from gossamer.worker.account import Account
from gossamer.worker.packet import Packet, unseal
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State

N = 4
SETTING = Setting(Plan((3,) * N, (2,) * N, ToyBody.LENGTH), rounds=4, seed=3, schedule=Constant())
UNEQUAL = replace(SETTING, plan=Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH))
METHODS = {
    "diloco": diloco(SETTING),
    "geomesh": geomesh(UNEQUAL),
    "geomesh_overlap": geomesh(UNEQUAL, overlap=0.3),
    "diloco_star": diloco(SETTING, exchange="hub", hub=1),
    "geomesh_star": geomesh(UNEQUAL, exchange="hub", hub=2, overlap=0.3),
    "gasloc": gasloc(UNEQUAL, topology="two_peer"),
    "gasloc_mod4": gasloc(UNEQUAL, topology="two_peer", codec="mod4"),
}


def trained(method: Method) -> list[tuple[State, Account]]:
    def job(group: Group) -> tuple[State, Account]:
        layout = toy_layout()
        group.all_equal({"parameter layout": layout_hash(layout)})
        state = start(Seat(group.me, method, layout, run_id=7), toy_start())
        return run(peer(Seat(group.me, method, layout, run_id=7), state), ToyBody(group.me, method.inner), Hooks(), group)

    return in_sites(N, job)


def same(states: list[State], want: list[State]) -> bool:
    return all(torch.equal(a.x[k], b.x[k]) for a, b in zip(states, want, strict=True) for k in b.x)


@pytest.mark.parametrize("name", METHODS)
def test_bits_and_bytes_are_those_without_a_clock(name: str) -> None:
    plain = Lockstep(METHODS[name])
    want, got = plain.run(), trained(METHODS[name])
    assert same([final for final, _ in got], want)
    assert [account.bytes_sent for _, account in got] == plain.sent
    assert sum(account.bytes_received for _, account in got) == sum(plain.sent)


def test_one_flipped_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    want = Lockstep(METHODS["gasloc"]).run()
    lock, flipped = threading.Lock(), []

    def flip(data: torch.Tensor) -> Packet:
        packet = unseal(data)
        with lock:
            if not flipped and packet.header.sender == 1 and packet.header.round == 2:
                packet.payload[2] ^= 64
                flipped.append(packet)
        return packet

    monkeypatch.setattr("gossamer.real.driver.unseal", flip)
    try:
        seen = not same([final for final, _ in trained(METHODS["gasloc"])], want)
    except RunFailed:
        seen = True
    assert flipped and seen

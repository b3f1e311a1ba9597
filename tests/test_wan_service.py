"""What the coordinator's service lets in: garbage, strangers, crowds and plain text are refused, and do no harm."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import hypothesis.strategies as st
import pytest
from coordinator_toys import X0, caller, eventually, quick
from hypothesis import HealthCheck, given, settings
from trust_toys import TERMS, Listed, dial, identity, sites

from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.roster.calls import plain
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.messages import MAX_MESSAGE_BYTES, Refusal, Refused, pack
from gossamer.wan.roster.records import PROTOCOL, Ask, Card, Join, Propose
from gossamer.wan.roster.service import SERVICE, CoordinatorServer
from gossamer.wan.trust.guard import Guard, caller_of
from gossamer.wan.trust.terms import Party, Terms


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorServer]:
    with CoordinatorServer(tmp_path_factory.mktemp("wan") / "runs.db", "127.0.0.1:0", threads=8) as made:
        yield made


METHODS = ("Join", "Beat", "Leave", "Propose", "HandIn", "Publish", "Plan", "Status")


def said(server: CoordinatorServer, method: str, data: bytes) -> Refusal | bytes:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        try:
            return channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=10.0)  # type: ignore[no-any-return]
        except grpc.RpcError as error:
            return Refusal.model_validate_json(error.details())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), data=st.binary(max_size=200) | st.text(max_size=50).map(lambda t: f'{{"caller": "{t}"}}'.encode()))
def test_garbage_is_refused_and_does_no_harm(server: CoordinatorServer, method: str, data: bytes) -> None:
    reply = said(server, method, data)
    assert isinstance(reply, Refusal) and reply.code == "garbage"
    assert server.coordinator.runs == {}


def test_garbage_on_the_stream_and_too_much_of_it(server: CoordinatorServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for data in (b"x", pack(caller("a"))):
            with pytest.raises(grpc.RpcError):
                next(channel.unary_stream(f"/{SERVICE}/Watch")(data, timeout=10.0))
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{SERVICE}/Join")(b" " * (MAX_MESSAGE_BYTES + 1), timeout=10.0)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{SERVICE}/Exec")(b"", timeout=10.0)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_refusal_is_logged_once(server: CoordinatorServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer.wan.roster.service"):
        for _ in range(5):
            reply = said(server, "Plan", pack(caller("nobody")))
            assert isinstance(reply, Refusal) and reply.code == "unknown"
    assert len([r for r in caplog.records if "nobody" in r.message]) == 1


def test_calls_that_wait_leave_room_for_those_that_do_not(server: CoordinatorServer) -> None:
    clients = [CoordinatorClient(plain(f"127.0.0.1:{server.port}"), quick("crowd", seats=1, min_sites=1), "a", Card(address=None))]
    a = clients[0]
    a.join(5.0)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    waiting = pack(Propose(caller=a.caller, number=1, have=None, alive=(0,), wait_s=20.0))
    calls = [channel.unary_unary(f"/{SERVICE}/Propose").future(waiting, timeout=20.0) for _ in range(20)]
    eventually(lambda: sum(c.done() for c in calls) >= 14, "most are refused")
    began_s = time.monotonic()
    a.status(5.0)
    assert time.monotonic() - began_s < 2.0 and a.failure is None
    for call in calls:
        call.cancel()
    channel.close()
    a.leave()


def test_a_site_speaks_for_itself_only(tmp_path: Path) -> None:
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", identify=lambda context: "oslo") as server:
        of = quick(seats=1, min_sites=1)
        lyon, oslo = (CoordinatorClient(plain(f"127.0.0.1:{server.port}"), of, s, Card(address=None)) for s in ("lyon", "oslo"))
        with pytest.raises(Refused, match="certificate of site oslo"):
            lyon.join(5.0)
        oslo.join(5.0)
        lyon.close(), oslo.leave()


def test_with_certificates_and_sessions(tmp_path: Path) -> None:
    made = sites(tmp_path)
    me = identity(made, "a")

    def open_(bind: str) -> CoordinatorServer:
        guard = Guard("a", {"run-1": Party(TERMS, Listed("b", "c"))}.get, me)
        name = lambda context: caller_of(context).site  # noqa: E731
        return CoordinatorServer(tmp_path / "runs.db", bind, interceptors=[guard], listen=guard.listen, identify=name)

    of = quick("run-1", seats=2)
    server = open_("127.0.0.1:0")
    address = f"127.0.0.1:{server.port}"
    foreign = Terms("run-1", b"x" * 32, TERMS.configuration, TERMS.layout)
    stranger = CoordinatorClient(dial(address, identity(made, "b"), terms=foreign).channel, of, "b", Card(address=None))
    with pytest.raises(RunFailed, match="secret"):
        stranger.join(5.0)
    b, c = (CoordinatorClient(dial(address, identity(made, s)).channel, of, s, Card(address=None)) for s in ("b", "c"))
    b.join(10.0), c.join(10.0)
    assert b.wait_for(lambda r: len(r.living) == 2, 10.0)
    posing = CoordinatorClient(dial(address, identity(made, "c")).channel, of, "b", Card(address=None))
    with pytest.raises(Refused, match="for site b with the certificate of site c"):
        posing.join(5.0)
    server.close()
    eventually(lambda: b.away_s is not None and c.away_s is not None, "away")
    with open_(address) as server:
        eventually(lambda: b.away_s is None and c.away_s is None, "a new session, by themselves")
        said = [Propose(caller=x.caller, number=1, have=X0, alive=(0, 1)) for x in (b, c)]
        b.propose(said[0], 5.0)
        assert c.propose(said[1], 5.0).session is not None and b.failure is None
        for client in (b, c, posing, stranger):
            client.close()


def test_off_the_machine_there_is_no_plain_text(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0", ":0"):
        with pytest.raises(BadInput, match="no certificates"):
            CoordinatorServer(tmp_path / "runs.db", address)
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0") as server, pytest.raises(BadInput, match="in use"):
        CoordinatorServer(tmp_path / "runs.db", f"127.0.0.1:{server.port}")
    with CoordinatorServer(tmp_path / "a.db", "127.0.0.1:0") as server, pytest.raises(BadInput, match="cannot be bound"):
        CoordinatorServer(tmp_path / "b.db", f"127.0.0.1:{server.port}")


def test_a_damaged_state_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with CoordinatorServer(path, "127.0.0.1:0", threads=8) as server:
        assert isinstance(
            said(server, "Join", pack(Join(protocol=PROTOCOL, spec=quick(), caller=caller("a"), card=Card(address=None)))), bytes
        )
        server._db._db.execute("DROP TABLE sessions")  # as where the disk cannot be read
        refusal = said(server, "Status", pack(Ask()))
        assert isinstance(refusal, Refusal) and refusal.code == "disk" and "could not read its state" in refusal.text
        server._db._db.execute("UPDATE runs SET state = '{}'")
    with pytest.raises(BadInput, match=r"runs\.db cannot be used as the coordinator's state \(no Membership.*move it away"):
        CoordinatorServer(path, "127.0.0.1:0", threads=8)

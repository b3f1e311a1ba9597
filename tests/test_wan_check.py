"""`gossamer wan check`: each thing that can be wrong is said in words, with a remedy; and dialling back is no scanner."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from ports import free
from trust_toys import TERMS, Listed, believing, identity, sites

from gossamer.app.wan import ops
from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan import check, dialback
from gossamer.wan.check import Check
from gossamer.wan.dialback import may_dial
from gossamer.wan.findings import Finding
from gossamer.wan.relay.client import RelayClient
from gossamer.wan.roster.calls import plain
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.trust import certificates
from gossamer.wan.trust.certificates import Certificate, Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.doors import Anybody
from gossamer.wan.trust.guard import Guard, caller_of
from gossamer.wan.trust.terms import Party, new_secret


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


@contextmanager
def coordinator(tmp_path: Path, me: Identity | None, roster: Any = None) -> Iterator[str]:
    if me is None:
        services = [dialback.check_handlers(lambda context: None, None)]
        server = CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", services=services, threads=16)
    else:
        guard = Guard(me.site, {TERMS.run: Party(TERMS, roster or Anybody())}.get, me)
        name = lambda context: caller_of(context).site  # noqa: E731
        server = CoordinatorServer(
            tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, identify=name, threads=16,
            services=[dialback.check_handlers(name, me)],
        )  # fmt: skip
    with server:
        yield f"127.0.0.1:{server.port}"


def checked(at: str, me: Identity | None, bind: str | None = None, advertise: str | None = None, **options: Any) -> list[Finding]:
    site = options.pop("site", me.site if me else "b")
    channel = plain(at) if me is None else Dial(Party(TERMS, Anybody()), me.site, at, None, me).channel
    return list(Check(channel, site, at, bind, advertise, me, **{"seconds": 0, **options}).run())


def bad(findings: list[Finding]) -> Finding:
    """The one finding that is wrong."""
    (found,) = [f for f in findings if f.level == "wrong"]
    assert found.remedy and found.text
    return found


@pytest.mark.parametrize("tls", [True, False])
def test_a_site_that_can_be_dialled(made: Path, tmp_path: Path, tls: bool) -> None:
    a, b = (identity(made, s) if tls else None for s in "ab")
    with coordinator(tmp_path, a) as at:
        bind = f"127.0.0.1:{free()}"
        found = checked(at, b, bind, seconds=0.2)
    assert {f.level for f in found} == {"ok"}
    said = {f.what: f.text for f in found}
    assert said["dial back"] == f"the coordinator reaches this site at {bind}"
    assert "Mbit/s to the coordinator" in said["rate"] and "round trip" in said["answer"]
    assert ("believe each other" in said["TLS"]) if tls else ("TLS" not in said)


def test_a_site_that_only_dials_out(made: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, identity(made, "a")) as at:
        found = checked(at, identity(made, "b"))
    assert {f.level for f in found} == {"ok"} and "relay" in found[-1].text


def test_the_coordinator_is_not_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = identity(made, "b")
    refused = bad(checked(f"127.0.0.1:{free()}", b))
    assert "refuses the connection" in refused.text and "--bind" in refused.remedy
    name = bad(checked("nowhere.invalid:7400", b))
    assert "nowhere.invalid does not resolve" in name.text

    def dropped(*args: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(dialback.socket, "create_connection", dropped)
    filtered = bad(checked("127.0.0.1:7400", b))
    assert "drops the packets" in filtered.text and "firewall" in filtered.remedy

    def nowhere(*args: Any) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(dialback.socket, "create_connection", nowhere)
    assert "No route to host" in bad(checked("127.0.0.1:7400", b)).text


@contextmanager
def other_service(answer: bytes) -> Iterator[int]:
    """Something that listens, and is none of ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answered(one: socket.socket) -> None:
            with one, suppress(OSError):
                one.sendall(answer)
                one.recv(1 << 16)  # what is left unread at the end would take the answer with it

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answered, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


def test_another_service_answers_for_the_coordinator(made: Path) -> None:
    with other_service(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "without TLS" in bad(checked(f"127.0.0.1:{port}", identity(made, "b"))).text
        assert "does not speak as a coordinator" in bad(checked(f"127.0.0.1:{port}", None)).text


def test_the_port_of_a_site_is_no_coordinator(made: Path, tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[guard := Guard("a", lambda run: None, identity(made, "a"))])
    port = guard.listen(server, "127.0.0.1:0")
    server.start()
    found = bad(checked(f"127.0.0.1:{port}", identity(made, "b")))
    assert found.text == f"127.0.0.1:{port} is the port of site a, not of a coordinator" and "gossamer wan coordinator" in found.remedy
    server.stop(None).wait()


def test_certificates_that_do_not_fit(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator(tmp_path, identity(made, "a")) as at:
        other = bad(checked(at, identity(made, "b", "theirs")))
        assert other.what == "TLS" and "CA" in other.text and "use one CA" in other.remedy
        name = bad(checked(at.replace("127.0.0.1", "127.0.0.2"), identity(made, "b"))) if _second_loopback() else None
        assert name is None or name.what in ("TLS", "coordinator")
        wrong_site = bad(checked(at, identity(made, "b"), site="c"))
        assert "for site b, and this is site c" in wrong_site.text
        with monkeypatch.context() as patch:
            patch.setattr(check, "now_utc", lambda: certificates.now_utc() + timedelta(days=360))
            soon = checked(at, identity(made, "b"))
            assert [f.what for f in soon if f.level == "warning"] == ["certificate", "TLS"]
        old = believing(monkeypatch, made, "old")
        assert bad(checked(at, old)).what == "TLS"


def _second_loopback() -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.2", 0)):
        return True
    return False


def test_the_coordinator_does_not_want_this_site(made: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, identity(made, "a"), Listed("c")) as at:
        found = bad(checked(at, identity(made, "b")))
        assert found.what == "answer" and "not in the roster" in found.text


def test_a_coordinator_without_the_check(made: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert "no coordinator of this release" in bad(checked(f"127.0.0.1:{port}", None)).text
    server.stop(None).wait()


# ---- the way back


def dialled(monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path, bind: str, advertise: str) -> Finding:
    with coordinator(tmp_path, identity(made, "a")) as at:
        return bad(checked(at, identity(made, "b"), bind, advertise))


def test_nothing_listens_where_the_site_says(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free()
    found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{free()}", f"127.0.0.1:{port}")
    assert f"nothing listens there at port {port}" in found.text and "forward port" in found.remedy and "relay" in found.remedy


def test_somebody_else_answers_there(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_service(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{free()}", f"127.0.0.1:{port}")
    assert "somebody else answers" in found.text and "without TLS" in found.text


def test_another_site_answers_there(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    port = Guard("c", lambda run: None, identity(made, "c")).listen(server, "127.0.0.1:0")
    server.start()
    found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{free()}", f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert "is not site b" in found.text


def test_another_process_of_the_site_answers_there(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"0" * 32)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(dialback.SERVICE, {"Answer": answer}),))
    port = Guard("b", lambda run: None, identity(made, "b")).listen(server, "127.0.0.1:0")
    server.start()
    found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{free()}", f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert "another process of site b" in found.text


def test_the_port_is_taken_here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_service(b"") as port:
        found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{port}", f"127.0.0.1:{port}")
    assert found.what == "bind" and "cannot be bound" in found.text


@pytest.mark.parametrize(
    ("advertise", "result", "why"),
    [
        ("198.51.100.7:7001", None, "calls come from 127.0.0.1"),
        ("nowhere.invalid:7001", None, "cannot resolve nowhere.invalid"),
        ("0.0.0.0:7001", None, "all addresses of a machine"),
        ("127.0.0.1:7001", "filtered", "a firewall drops the packets"),
        ("127.0.0.1:7001", "unreachable", "no way to 127.0.0.1:7001"),
    ],
)
def test_what_else_can_be_wrong_with_an_address(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advertise: str, result: str | None, why: str
) -> None:
    if result:
        real = dialback.reach
        monkeypatch.setattr(dialback, "reach", lambda host, port, *a: (result, "") if port == 7001 else real(host, port, *a))
    found = dialled(monkeypatch, made, tmp_path, f"127.0.0.1:{free()}", advertise)
    assert why in found.text


@pytest.mark.parametrize(
    ("advertise", "source", "level", "why"),
    [
        ("127.0.0.1:1", "203.0.113.9", "wrong", "loopback"),
        ("localhost:1", "203.0.113.9", "wrong", "loopback"),
        ("[::1]:1", "203.0.113.9", "wrong", "loopback"),
        ("192.168.1.5:1", "8.8.8.8", "wrong", "private address, which sites in other networks cannot dial"),
        ("192.168.1.5:1", "192.168.1.5", "warning", "good for sites of this network"),
        ("169.254.3.4:1", "8.8.8.8", "wrong", "one network segment"),
        ("203.0.113.5:1", "203.0.113.5", "warning", "for examples in documentation"),
        ("198.51.100.5:1", "8.8.8.8", "warning", "for examples in documentation"),
        ("8.8.8.8:1", "8.8.8.8", None, ""),
        ("site.example.org:1", "8.8.8.8", None, ""),
    ],
)
def test_addresses_that_the_others_cannot_dial(advertise: str, source: str, level: str | None, why: str) -> None:
    one = Check(plain("x"), "b", "coordinator.example.org:7400", "0.0.0.0:1", advertise, None)
    found = one._advertised(dialback.Looked(source=source, site=None))
    assert (found.level if found else None) == level and (found is None or why in found.text)
    if found is not None:
        assert advertise not in found.remedy, "what is warned about is not what to do"
        assert (f"such as {source}:1" in found.remedy) == (source != advertise.removesuffix(":1"))


def test_a_service_that_is_not_there_is_said_in_words_and_at_once(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, secret, mine = f"127.0.0.1:{free()}", tmp_path / "run.secret", identity(made, "b")
    new_secret(secret)
    refuses = f"{at} refuses the connection: the machine is there, and nothing listens at this port"
    with pytest.raises(RunFailed, match=rf"^{re.escape(refuses)}: start gossamer wan coordinator there"):
        ops.status(at, run=None, watch=False, every_s=1.0, identity=mine.folder, secret=secret)
    monkeypatch.delattr(RelayClient, "wait")  # there is nothing to wait for
    found = ops._relay(at, "b", mine, mine.folder, secret)
    assert found.level == "wrong" and found.text == refuses and found.remedy.startswith("start gossamer wan relay there")


def test_a_router_in_between_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Check(plain("x"), "b", "127.0.0.1:7400", "0.0.0.0:7001", "203.0.113.9:7001", None)
    (found,) = one._translated(dialback.Looked(source="203.0.113.9", site=None))
    assert found.level == "warning" and "NAT" in found.text and "relay" in found.remedy
    (found,) = one._translated(dialback.Looked(source="127.0.0.1", site=None))
    assert found.level == "ok"


# ---- no scanner


def certificate(*hosts: str) -> Certificate:
    return Certificate("b", 1, certificates.now_utc(), certificates.now_utc(), hosts, b"")


@pytest.mark.parametrize(
    ("ip", "host", "source", "hosts", "may"),
    [
        ("203.0.113.9", "203.0.113.9", "203.0.113.9", (), True),
        ("203.0.113.9", "name", "::ffff:203.0.113.9", (), True),
        ("203.0.113.8", "203.0.113.8", "203.0.113.9", (), False),
        ("203.0.113.8", "203.0.113.8", "203.0.113.9", ("203.0.113.8",), True),
        ("8.8.8.8", "b.example.org", "203.0.113.9", ("b.example.org",), True),
        ("10.0.0.1", "b.example.org", "203.0.113.9", ("b.example.org",), False),  # a name that leads into the coordinator's network
        ("10.0.0.1", "10.0.0.1", "203.0.113.9", ("10.0.0.1",), True),  # the CA says so
        ("127.0.0.1", "127.0.0.1", "203.0.113.9", ("127.0.0.1",), False),
        ("::1", "localhost", "203.0.113.9", ("localhost",), False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", (), True),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", (), False),
        ("169.254.169.254", "169.254.169.254", "203.0.113.9", ("169.254.169.254",), False),
        ("224.0.0.1", "224.0.0.1", "224.0.0.1", (), False),
    ],
)
def test_who_is_dialled_back(ip: str, host: str, source: str, hosts: tuple[str, ...], may: bool) -> None:
    assert may_dial(ip, host, source, certificate(*hosts)) == may
    assert may_dial(ip, host, source, None) == (may and not hosts)


def test_dialling_back_is_limited(made: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, identity(made, "a")) as at:
        b = identity(made, "b")
        found = [checked(at, b, f"127.0.0.1:{free()}")[-1] for _ in range(dialback.OFTEN + 1)]
        assert [f.level for f in found] == ["ok"] * dialback.OFTEN + ["wrong"]
        assert "was checked 6 times" in found[-1].text
        assert checked(at, identity(made, "c"), f"127.0.0.1:{free()}")[-1].level == "ok"  # of each site
    limits = dialback._Limits()
    with ExitStack() as stack:
        for site in "abcd":
            stack.enter_context(limits.taken(site))
        with pytest.raises(Refused, match="4 sites are being checked"):
            stack.enter_context(limits.taken("e"))
    with limits.taken("f"):
        pass


def test_nobody_is_dialled_back_for_another_site(made: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, identity(made, "a")) as at:
        b = identity(made, "b")
        with Dial(Party(TERMS, Anybody()), "b", at, None, b).channel() as channel:
            for method, message in (("Look", dialback.Look(site="c")), ("Back", dialback.Back(site="c", address="127.0.0.1:1"))):
                with pytest.raises(grpc.RpcError, match="with the certificate of site b"):
                    channel.unary_unary(f"/{dialback.SERVICE}/{method}")(dialback.pack(message), timeout=10)
            for junk in (b"", b"[" * 5000, b'{"site": "b", "address": "x"}'):
                with pytest.raises(grpc.RpcError, match="no Back"):
                    channel.unary_unary(f"/{dialback.SERVICE}/Back")(junk, timeout=10)
        with grpc.insecure_channel(at) as channel, pytest.raises(grpc.RpcError):  # nobody without a certificate
            channel.unary_unary(f"/{dialback.SERVICE}/Look")(dialback.pack(dialback.Look(site="b")), timeout=10)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Check(plain("x"), "b", "no-port", None, None, None), "expected HOST:PORT"),
        (lambda: Check(plain("x"), "b", "h:1", "0.0.0.0:0", None, None), "--bind"),
        (lambda: Check(plain("x"), "b", "h:1", "0.0.0.0:7", "h:99999", None), "--advertise"),
        (lambda: Check(plain("x"), "b", "h:1", None, "h:7", None), "give --bind too"),
        (lambda: Check(plain("x"), "b", "h:1", None, None, None, seconds=60), "--seconds 60"),
    ],
)
def test_what_cannot_be_meant(make: Callable[[], Check], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        make()

"""Who is believed: real servers and callers on 127.0.0.1. What is refused is refused in words, and the server goes on."""

from __future__ import annotations

import ipaddress
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from trust_toys import ECHO, TALK, TERMS, WATCH, Listed, believing, call, dial, fresh, identity, raw, serving, sites, unharmed

from gossamer import BadInput
from gossamer.wan.trust import ca, certificates, gate
from gossamer.wan.trust import greeting as G
from gossamer.wan.trust.certificates import Identity, load_authority
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.gate import Seen
from gossamer.wan.trust.guard import Guard
from gossamer.wan.trust.terms import Distrusted, Party, Terms, is_loopback


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


def test_the_right_certificate_calls_and_streams(made: Path) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        one = dial(address, identity(made, "b"))
        assert one.open() == "a"
        with one.channel() as channel, one.channel((("grpc.use_local_subchannel_pool", 1),)) as second:
            assert channel.unary_unary(ECHO)(b"x", timeout=10) == b"b run-1 x"
            assert second.unary_unary(ECHO).future(b"y", timeout=10).result() == b"b run-1 y"
            assert list(channel.stream_stream(TALK)(iter([b"1", b"2"]), timeout=10)) == [b"b1", b"b2"]
            stream = channel.unary_stream(WATCH)(b"", timeout=10)
            assert next(stream) == b"here"
            stream.cancel()
        unknown = dial(address, identity(made, "b"), site=None)  # by its host alone
        assert unknown.open() == "a" and unknown.site == "a"


def test_many_callers_at_once(made: Path) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, _), ThreadPoolExecutor(8) as pool:
        one = dial(address, identity(made, "b"))
        with one.channel() as channel:
            echo = channel.unary_unary(ECHO)
            assert list(pool.map(lambda k: echo(b"%d" % k, timeout=30), range(200))) == [b"b run-1 %d" % k for k in range(200)]


@pytest.mark.parametrize("site, of", [("b", "theirs"), ("old", "ours"), ("young", "ours")])
def test_a_certificate_that_tls_refuses(made: Path, monkeypatch: pytest.MonkeyPatch, site: str, of: str) -> None:
    """The caller believes the server, so that it is the server that refuses."""
    with serving(identity(made, "a"), Listed("b", "old", "young")) as (address, _):
        with monkeypatch.context() as patch:
            wrong = replace(believing(patch, made, site, of), authority_pem=(made / "ours" / "ca.pem").read_bytes())
            words = rf"has seen this site's certificate \(of site {site}, good from .* UTC to .* UTC\): .* one CA"
            with pytest.raises(Distrusted, match=words) as caught:
                call(dial(address, wrong))
        assert caught.value.reason == "certificate"
        unharmed(address, made)


def test_a_server_that_the_caller_refuses(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        with pytest.raises(Distrusted, match="is not of this project's CA"):
            call(dial(address, identity(made, "b", "theirs")))
        with pytest.raises(Distrusted, match="is not site c, or its certificate"):
            call(dial(address, identity(made, "b"), site="c"))
        unharmed(address, made)
    other = Guard("c", {}.get, identity(made, "c"))
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[other])
    port = other.listen(server, "127.0.0.1:0")
    server.start()
    with pytest.raises(Distrusted, match="is not for that host: issue it with --host localhost, or say which site it is"):
        call(dial(f"localhost:{port}", identity(made, "b"), site=None))
    server.stop(None).wait()
    with monkeypatch.context() as patch:
        old = believing(patch, made, "old")
        guard = Guard("old", {}.get, old)
        server = grpc.server(ThreadPoolExecutor(1), interceptors=[guard])
        port = guard.listen(server, "127.0.0.1:0")
        server.start()
        with pytest.raises(Distrusted, match=r"the certificate of 127\.0\.0\.1:\d+ has expired"):
            call(dial(f"127.0.0.1:{port}", identity(made, "b"), site="old"))
        server.stop(None).wait()
    plain = Guard("a", {}.get, None)
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[plain])
    port = plain.listen(server, "127.0.0.1:0")
    server.start()
    with pytest.raises(Distrusted, match="answers without TLS"):
        call(dial(f"127.0.0.1:{port}", identity(made, "b")))
    server.stop(None).wait()


def test_nobody_there_is_not_distrust(made: Path) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        pass
    with pytest.raises(grpc.RpcError) as caught:
        call(dial(address, identity(made, "b")))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and not isinstance(caught.value, Distrusted)


def test_revoked_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, a, load = fresh(tmp_path)
    b, c = load("b"), load("c")
    with serving(a, Listed("b", "c")) as (address, _):
        one, two = dial(address, b), dial(address, c)
        with one.channel() as channel, two.channel() as other:
            stream = channel.unary_stream(WATCH)(b"", timeout=30)
            assert next(stream) == b"here"
            assert other.unary_unary(ECHO)(b"", timeout=10) == b"c run-1 "
            ca.revoke(folder, "b")
            shutil.copy2(folder / "revoked.pem", a.folder / "revoked.pem")
            assert other.unary_unary(ECHO)(b"", timeout=10) == b"c run-1 "  # a call by another is enough to notice
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert ended.value.code() == grpc.StatusCode.CANCELLED
            for _ in range(3):
                with pytest.raises(
                    Distrusted, match=r"of site b \(serial \w+\) was revoked on .* UTC: .*gossamer wan ca issue b"
                ) as caught:
                    channel.unary_unary(ECHO)(b"", timeout=10)
                assert caught.value.reason == "revoked"
            assert c.revocations.when(b.certificate.serial), "the new session has handed the list on"
            assert other.unary_unary(ECHO)(b"", timeout=10) == b"c run-1 "
        ca.issue(folder, "b", ["127.0.0.1"], out=tmp_path / "again")
        assert call(dial(address, Identity.load(tmp_path / "again"))) == b"b run-1 hi"
    assert sum("refused: " in r.message for r in caplog.records) == sum("refused: b: " in r.message for r in caplog.records) == 1


def test_a_revoked_server_is_not_called(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    b = load("b")
    with serving(a, Listed("b")) as (address, _):
        one = dial(address, b)
        with one.channel() as channel:
            assert channel.unary_unary(ECHO)(b"", timeout=10) == b"b run-1 "
            ca.revoke(folder, "a")
            shutil.copy2(folder / "revoked.pem", b.folder / "revoked.pem")
            for _ in range(2):  # in the session, and in a new one
                with pytest.raises(Distrusted, match=r"of site a .* was revoked"):
                    channel.unary_unary(ECHO)(b"", timeout=10)


def test_expired_while_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, a, load = fresh(tmp_path)
    short = Identity.load(ca.issue(folder, "b", days=2, out=tmp_path / "short"))
    with serving(a, Listed("b", "c")) as (address, _), dial(address, short).channel() as channel:
        stream = channel.unary_stream(WATCH)(b"", timeout=30)
        assert next(stream) == b"here"
        monkeypatch.setattr(certificates, "now_utc", lambda: datetime.now(UTC) + timedelta(days=3))
        with pytest.raises(Distrusted, match="the certificate of site b expired on"):
            channel.unary_unary(ECHO)(b"", timeout=10)
        monkeypatch.setattr(Dial, "_check_self", lambda self: None)
        with pytest.raises(Distrusted, match=r"site a refuses this call: the certificate of site b expired on \d{4}") as caught:
            channel.unary_unary(ECHO)(b"", timeout=10)
        assert caught.value.reason == "expired"
        monkeypatch.setattr(gate, "SWEEP_S", 0.0)
        assert call(dial(address, load("c"))) == b"c run-1 hi"
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.code() == grpc.StatusCode.CANCELLED


def test_a_site_that_is_in_no_roster(made: Path) -> None:
    roster = Listed("b", "c")
    with serving(identity(made, "a"), roster) as (address, guard):
        roster.sites.discard("c")
        with pytest.raises(Distrusted, match="not in the roster") as caught:
            call(dial(address, identity(made, "c")))
        assert caught.value.reason == "site" and caught.value.passing and "(epoch 7)" in str(caught.value)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        one = dial(address, identity(made, "b"))
        with one.channel() as channel:
            stream = channel.unary_stream(WATCH)(b"", timeout=30)
            assert next(stream) == b"here"
            roster.sites.discard("b")
            roster.epoch = 8
            with pytest.raises(Distrusted, match=r"site b is not in the roster of run run-1 \(epoch 8\)"):
                channel.unary_unary(ECHO)(b"", timeout=10)
            guard.sweep()
            with pytest.raises(grpc.RpcError):
                next(stream)
        roster.sites.add("b")
        unharmed(address, made)
        alone = Dial(Party(TERMS, Listed()), "b", address, "a", identity(made, "b"))
        with pytest.raises(Distrusted, match=r"site a at .* is not in the roster"):
            call(alone)


@pytest.mark.parametrize(
    "terms, reason, words",
    [
        (replace(TERMS, run="run-2"), "run", "run run-2 is not one of site a: check the run id"),
        (
            replace(TERMS, configuration="dead"),
            "configuration",
            "the configuration of site b is dead, that of site a is c0ffee: run run-1 needs",
        ),
        (replace(TERMS, configuration=None), "configuration", "the configuration of site b is unknown"),
        (replace(TERMS, layout="1a71"), "layout", "the parameter layout of site b is 1a71, that of site a is 1a70"),
        (replace(TERMS, secret=b"t" * 32), "secret", "another secret of run run-1: bring the file of gossamer wan secret"),
    ],
)
@pytest.mark.parametrize("tls", [True, False])
def test_a_foreign_run(made: Path, caplog: pytest.LogCaptureFixture, terms: Terms, reason: str, words: str, tls: bool) -> None:
    a, b = (identity(made, "a"), identity(made, "b")) if tls else (None, None)
    with serving(a, Listed("b")) as (address, _):
        one = dial(address, b, terms=terms)
        for _ in range(4):
            with pytest.raises(Distrusted, match=f"^site a refuses this call: {words}") as caught:
                call(one)
        assert caught.value.reason == reason and not caught.value.passing
        refused = [r.message for r in caplog.records if r.name == "gossamer.wan.trust" and r.levelno >= logging.WARNING]
        assert len(refused) == 1 and refused[0].startswith(f"refused: {'b' if tls else '127.0.0.1'}: {words}")
        assert call(dial(address, b)) == b"b run-1 hi"


def test_another_version(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        with monkeypatch.context() as patch:
            patch.setattr("gossamer.wan.trust.dial.PROTOCOL", 99)
            with pytest.raises(Distrusted, match="speaks protocol version 99, site a version 1: run one release") as caught:
                call(dial(address, identity(made, "b")))
        assert caught.value.reason == "version"
        hello = bytes(G.MAC_BYTES) + json.dumps({"protocol": 2, "something": "new"}).encode()
        with raw(address, identity(made, "b")) as channel, pytest.raises(grpc.RpcError, match="protocol version 2"):
            channel.unary_unary(G.HELLO)(hello, timeout=10)
        unharmed(address, made)


def test_a_coordinator_compares_no_hashes_that_it_does_not_know(made: Path) -> None:
    with serving(identity(made, "a"), Listed("b"), replace(TERMS, configuration=None, layout=None)) as (address, _):
        unharmed(address, made)


def test_a_site_is_what_its_certificate_says(made: Path) -> None:
    """A member with the secret cannot pass for another one."""
    with serving(identity(made, "a"), Listed("b", "c")) as (address, _):
        one = dial(address, identity(made, "c"))
        one._me = "b"
        with pytest.raises(Distrusted, match="it says that it is site b, and its certificate is for site c"):
            call(one)
        # Nor with a session of the other, were it to learn its key.
        stolen = dial(address, identity(made, "b"))
        stolen.open()
        thief = dial(address, identity(made, "c"))
        thief._session = stolen._session
        with pytest.raises(Distrusted, match="a session of site b, used by site c"):
            call(thief)
    with pytest.raises(BadInput, match="is for site b: give this site's own folder"):
        Guard("a", {}.get, identity(made, "b"))
    with pytest.raises(BadInput, match="is for site b: give this site's own folder"):
        dial("127.0.0.1:1", identity(made, "b"), as_="a")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("tls", [True, False])
def test_a_repeated_call_is_refused(made: Path, tls: bool) -> None:
    a, b = (identity(made, "a"), identity(made, "b")) if tls else (None, None)
    with serving(a, Listed("b")) as (address, guard):
        one = dial(address, b)
        with raw(address, b) as channel:
            session = one.greeted(channel, 10)
            made_call = session.call(ECHO)
            send = lambda shown, method=ECHO: channel.unary_unary(method)(b"x", metadata=(shown,), timeout=10)  # noqa: E731
            assert send(made_call.metadata) == b"b run-1 x"
            with pytest.raises(grpc.RpcError, match="a repeated call is not answered"):
                send(made_call.metadata)
            later, sooner = session.call(ECHO), session.call(ECHO)
            assert send(sooner.metadata) == send(later.metadata) == b"b run-1 x"  # overtaken is not repeated
            for bad in (session.call(TALK).metadata, (G.CALL_KEY, flipped(session.call(ECHO).metadata[1]))):
                with pytest.raises(grpc.RpcError, match="MAC is wrong"):
                    send(bad)
            # A server that was started again knows no session of before, so nothing of before can be repeated.
            unused = session.call(ECHO)
            guard._sessions.clear()
            with pytest.raises(grpc.RpcError, match="no such session"):
                send(unused.metadata)
        assert call(one) == b"b run-1 hi"  # callers notice, and greet again


def test_a_repeated_greeting_gives_no_session_that_can_be_used(made: Path) -> None:
    with serving(None, Listed("b")) as (address, _), raw(address, None) as channel:
        one = dial(address, None)
        hello, key = one._hello()
        send = channel.unary_unary(G.HELLO)
        first, second = send(hello, timeout=10), send(hello, timeout=10)
        names = {json.loads(x[G.MAC_BYTES :])["session"] for x in (first, second)}
        assert len(names) == 2
        session = one._welcomed(second, hello, key)
        assert channel.unary_unary(ECHO)(b"", metadata=(session.call(ECHO).metadata,), timeout=10) == b"b run-1 "
        with pytest.raises(Distrusted, match="does not know the secret"):  # an answer to another greeting
            one._welcomed(second, one._hello()[0], key)


def test_a_server_that_only_pretends(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else on the port, with and without the secret."""
    with serving(None, Listed("b"), replace(TERMS, secret=b"t" * 32)) as (address, _):
        one = dial(address, None, terms=replace(TERMS, secret=b"t" * 32))
        one._party = Party(TERMS, Listed("a"))
        monkeypatch.setattr(one, "_hello", dial(address, None, terms=replace(TERMS, secret=b"t" * 32))._hello)
        with pytest.raises(Distrusted, match="does not know the secret of run run-1"):
            call(one)
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        one = dial(address, identity(made, "b"))
        with one.channel() as channel, raw(address, identity(made, "b")) as plain:
            session = one.greeted(plain, 10)
            real = session.call
            monkeypatch.setattr(session, "call", lambda method: real(method)._replace(answer=bytes(32)))
            with pytest.raises(Distrusted, match="is not that of site a: it is not believed"):
                channel.unary_unary(ECHO)(b"", timeout=10)
            with pytest.raises(Distrusted, match="it is not believed"):
                next(channel.unary_stream(WATCH)(b"", timeout=10))
        monkeypatch.undo()
        # The key of another certificate than the one it shows.
        with monkeypatch.context() as patch:
            stranger, sign = identity(made, "c"), Identity.sign
            patch.setattr(Identity, "sign", lambda self, message: sign(stranger, message))
            with pytest.raises(Distrusted, match="has not the key of its certificate"):
                call(dial(address, identity(made, "b")))
        unharmed(address, made)


def test_a_certificate_of_the_ca_that_names_no_site(made: Path, tmp_path: Path) -> None:
    """Of the project, but not made by `gossamer wan ca issue`."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = load_authority(made / "ours" / "ca.pem")
    signer = serialization.load_pem_private_key((made / "ours" / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "b")])
    now = datetime.now(UTC)
    odd = (
        x509.CertificateBuilder().subject_name(name).issuer_name(authority.subject).public_key(key.public_key())
        .serial_number(5).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(signer, hashes.SHA256())
    )  # fmt: skip
    pem = odd.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    b = identity(made, "b")
    stranger = replace(b, certificate=replace(b.certificate, pem=pem), key_pem=private)
    with serving(identity(made, "a"), Listed("b")) as (address, _):
        with pytest.raises(Distrusted, match=r"not the certificate of a site \(it names 0 sites, expected one\)"):
            call(dial(address, stranger))
        unharmed(address, made)


def test_without_certificates_only_loopback(made: Path) -> None:
    with serving(None, Listed("b")) as (address, guard):
        assert call(dial(address, None)) == b"b run-1 hi"
        with pytest.raises(Distrusted, match="for loopback only"):
            guard.hello(b"", Seen("ipv4:192.0.2.1:5", None))
    with serving(identity(made, "a"), Listed("b")) as (_, guard), pytest.raises(Distrusted, match="no certificate"):
        guard.hello(b"", Seen("ipv4:127.0.0.1:5", None))
    server = grpc.server(ThreadPoolExecutor(1))
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"):
        with pytest.raises(BadInput, match="not a loopback address, and there is no certificate"):
            Guard("a", {}.get, None).listen(server, address)
        with pytest.raises(BadInput, match="not a loopback address"):
            dial(address, None)
    with pytest.raises(BadInput, match="cannot be bound"):
        Guard("a", {}.get, identity(made, "a")).listen(server, "192.0.2.1:0")
    assert all(is_loopback(h) for h in ("127.1.2.3", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"))
    assert not any(is_loopback(h) for h in ("0.0.0.0", "", "127.0.0.1.example.org", "::", "10.0.0.1"))
    assert [Seen(p, None).host for p in ("ipv4:10.0.0.1:5", "ipv6:[::1]:5", "unix:/x")] == ["10.0.0.1", "::1", "unix:/x"]

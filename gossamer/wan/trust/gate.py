"""The checks of a server, whichever side of gRPC it uses (`gossamer.wan.trust.guard`): greetings, sessions, who may call, and the log of
refusals."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import grpc

from gossamer.core.errors import BadInput
from gossamer.wan.roster.records import PROTOCOL
from gossamer.wan.trust import greeting as G
from gossamer.wan.trust.certificates import Certificate, Identity
from gossamer.wan.trust.terms import Distrusted, Party, check_plain, host_of, is_loopback, mac, same

log = logging.getLogger("gossamer.wan.trust")

MAX_SESSIONS = 4096
MAX_SESSIONS_EACH = 64
"""Of one site in one run. The one unused for longest makes room."""
MAX_LOGGED = 1024
"""Refusals that are told apart in the log; whatever comes after them is not logged."""
SWEEP_S = 30.0
"""How often, at most, calls that are open are looked at again without a cause."""


class Seen(NamedTuple):
    """What gRPC knows of a peer before it has said anything."""

    peer: str
    """ipv4:127.0.0.1:4711, ipv6:[::1]:4711 or unix:..."""
    pem: bytes | None
    """Its certificate, whose signature TLS has checked."""

    @classmethod
    def of(cls, context: Any) -> Seen:
        """Of the context of a call."""
        found = context.auth_context().get("x509_pem_cert")
        return cls(unquote(context.peer()), found[0] if found else None)  # brackets are quoted in the names that gRPC gives

    @property
    def host(self) -> str:
        """The address without its port: what a peer is called before it is known."""
        return host_of(self.peer.partition(":")[2]) or self.peer[:64]

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return self.peer.startswith("unix:") or is_loopback(self.host)


class Caller(NamedTuple):
    """Who makes a call, as checked."""

    site: str
    run: str
    certificate: Certificate | None
    """None on loopback without TLS."""


class _Session(NamedTuple):
    site: str
    run: str
    key: bytes
    window: G.Window


class Admitted(NamedTuple):
    """A call that may be made."""

    caller: Caller
    answer: tuple[tuple[str, bytes], ...]
    """Initial metadata to send."""
    number: int


class Gate:
    """Lets through the calls of those who may call.

    Args:
        site: the id of this site.
        find: the run with an id, as this process takes part in it, or None. Asked on every call.
        identity: certificate and key; None: loopback only, without TLS.

    Raises:
        BadInput: the certificate is another site's.
    """

    def __init__(self, site: str, find: Callable[[str], Party | None], identity: Identity | None) -> None:
        if identity is not None and identity.site != site:
            raise BadInput(f"site {site}: the certificate in {identity.folder} is for site {identity.site}: give this site's own folder")
        self.site = site
        self._find = find
        self._identity = identity
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._open: dict[int, tuple[Caller, Callable[[Distrusted], None]]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._logged: set[tuple[str, str]] = set()
        self._list = identity.revocations.number if identity else 0
        self._swept_s = time.monotonic()

    @property
    def plain(self) -> bool:
        """Whether it goes without TLS, which is for loopback."""
        return self._identity is None

    def listen(self, server: Any, address: str) -> int:
        """Adds a port to a server, with TLS where there is a certificate, and returns its number.

        Args:
            address: host:port to bind; port 0: any that is free.

        Raises:
            BadInput: no certificate, and not a loopback address; or it cannot be bound.
        """
        if (mine := self._identity) is None:
            check_plain(address)
        try:
            if mine is None:
                port = server.add_insecure_port(address)
            else:
                pair = [(mine.key_pem, mine.certificate.pem)]
                port = server.add_secure_port(address, grpc.ssl_server_credentials(pair, mine.authority_pem, require_client_auth=True))
        except RuntimeError:
            port = 0
        if not port:
            raise BadInput(f"{address}: cannot be bound: give an address of this machine, and a port that is free")
        return int(port)

    def sweep(self) -> None:
        """Looks again at every call that is open, and ends those that would not be let in now. To be called when a roster has changed."""
        self._swept_s = time.monotonic()
        with self._lock:
            open_calls = list(self._open.values())
        for caller, end in open_calls:
            try:
                self._check_certificate(caller.certificate)
                self._check(caller)
            except Distrusted as error:
                self._say(error, caller.site)
                end(error)

    def look(self) -> None:
        """Looks whether the list of revoked certificates is another, and whether a certificate has come to its end, and ends the calls of
        those who may not call any more. To be called now and then: it costs little."""
        if self._identity is None:
            return
        self._look_at_list()
        with self._lock:
            shown = {caller.certificate for caller, _ in self._open.values() if caller.certificate is not None}
        if any(one.fault(self._identity.revocations) for one in shown):
            self.sweep()

    def sessionless(self, method: str) -> Callable[[bytes, Seen], bytes] | None:
        """What answers a call that needs no session; None: it is another one."""
        return {G.HELLO: self.hello, G.LIST: self.listed}.get(method)

    # ---- the list of revoked certificates

    def listed(self, raw: bytes, seen: Seen) -> bytes:
        """The list, for whoever has an older one; nothing for others.

        Raises:
            Distrusted: that is no question; logged.
        """
        try:
            number = G.number_of(raw)
        except Distrusted as error:
            self._say(error, seen.host)
            raise
        found = self._newer_than(number)
        return b"" if found is None else found

    def take(self, pem: bytes) -> bytes:
        """A newer list, from a caller that was let in. It is looked at in any case: the CA has signed it, or it is not taken."""
        if self._identity is not None and len(pem) <= G.MAX_LIST_BYTES:
            self._identity.revocations.offer(pem)
            self._look_at_list()
        return b""

    def _newer_than(self, number: int) -> bytes | None:
        if self._identity is None:
            return None
        revocations = self._identity.revocations
        pem = revocations.pem
        return pem if revocations.number > number and len(pem) <= G.MAX_LIST_BYTES else None

    # ---- a call

    def admit(self, method: str, metadata: Any, seen: Seen, end: Callable[[Distrusted], None]) -> Admitted:
        """Checks a call. `closed` is to be called when it is over.

        Args:
            end: ends the call for a reason, from any thread.

        Raises:
            Distrusted: it may not be made; logged.
        """
        who = seen.host
        try:
            certificate = self._certificate(seen)
            who = certificate.site if certificate else who
            self._check_certificate(certificate)
            session, counter = self._session_of(method, metadata, certificate)
            caller = Caller(session.site, session.run, certificate)
            who = caller.site
            self._check(caller)
        except Distrusted as error:
            self._turned_away(error, who)
            raise
        with self._lock:
            self._count += 1
            number = self._count
            self._open[number] = (caller, end)
        if time.monotonic() - self._swept_s > SWEEP_S:
            self.sweep()
        return Admitted(caller, ((G.ANSWER_KEY, G.answer_mac(session.key, method, counter)),), number)

    def closed(self, admitted: Admitted) -> None:
        """A call is over."""
        with self._lock:
            self._open.pop(admitted.number, None)

    def _certificate(self, seen: Seen) -> Certificate | None:
        """Of the peer, be it good now or not; None: a peer on this machine, and no certificates are in use."""
        if self._identity is None:
            if not seen.local:
                raise Distrusted("certificate", "calls without TLS are for loopback only")
            return None
        if not seen.pem:
            raise Distrusted("certificate", f"no certificate: site {self.site} speaks with those only that have one of the project's CA")
        try:
            return Certificate.parse(seen.pem)
        except ValueError as error:
            raise Distrusted("certificate", f"not the certificate of a site ({error}): use one of gossamer wan ca issue") from None

    def _check_certificate(self, certificate: Certificate | None) -> None:
        """That it is good now."""
        if certificate is not None and self._identity is not None:
            self._look_at_list()
            if fault := certificate.fault(self._identity.revocations):
                raise Distrusted(*fault)

    def _look_at_list(self) -> None:
        """Where the list of revoked certificates is another than at the last call, all sessions end (new ones hand the list on), and the
        calls that are open are looked at again."""
        assert self._identity is not None
        self._identity.revocations.refresh()
        number = self._identity.revocations.number
        with self._lock:
            if number == self._list:
                return
            self._list = number
            self._sessions.clear()
        self.sweep()

    def _session_of(self, method: str, metadata: Any, certificate: Certificate | None) -> tuple[_Session, int]:
        found = [value for key, value in metadata or () if key == G.CALL_KEY]
        if not found:
            raise Distrusted("session", "a call without a session: greet first")
        if len(found) != 1 or not isinstance(found[0], bytes) or len(found[0]) != G.CALL_BYTES:
            raise Distrusted("malformed", f"metadata {G.CALL_KEY}: expected once, {G.CALL_BYTES} bytes")
        name, rest = found[0][: G.SESSION_BYTES].hex(), found[0][G.SESSION_BYTES :]
        counter, shown = int.from_bytes(rest[: G.COUNTER_BYTES], "big"), rest[G.COUNTER_BYTES :]
        with self._lock:
            if session := self._sessions.get(name):
                self._sessions.move_to_end(name)
        if session is None:
            raise Distrusted("session", f"site {self.site} has no such session (any more): greet again")
        if certificate is not None and certificate.site != session.site:
            raise Distrusted("certificate", f"a session of site {session.site}, used by site {certificate.site}")
        if not same(shown, G.call_mac(session.key, method, counter)):
            raise Distrusted("secret", "a call whose MAC is wrong: it is not of who began the session")
        if not session.window.take(counter):
            raise Distrusted("replay", f"call {counter} of a session was made before: a repeated call is not answered")
        return session, counter

    def _check(self, caller: Caller) -> Party:
        """That a caller, whose certificate is good, may be there now."""
        if (party := self._find(caller.run)) is None:
            raise Distrusted("run", f"run {caller.run} is not one of site {self.site}")
        if not party.roster.allows(caller.site):
            raise Distrusted(
                "site", f"site {caller.site} is not in the roster of run {caller.run} (epoch {party.roster.epoch}): it joins first"
            )
        return party

    # ---- a greeting

    def hello(self, raw: bytes, seen: Seen) -> bytes:
        """Answers a greeting.

        Raises:
            Distrusted: it is refused; logged.
        """
        who = seen.host
        try:
            certificate = self._certificate(seen)
            who = certificate.site if certificate else who
            self._check_certificate(certificate)
            return self._welcome(raw, certificate)
        except Distrusted as error:
            self._turned_away(error, who)
            raise

    def _welcome(self, raw: bytes, certificate: Certificate | None) -> bytes:
        hello, party = self._compared(raw)
        secret = party.terms.secret
        if certificate is not None and certificate.site != hello.site:
            raise Distrusted("certificate", f"it says that it is site {hello.site}, and its certificate is for site {certificate.site}")
        if not same(raw[: G.MAC_BYTES], mac(secret, "hello", b"", raw[G.MAC_BYTES :])):
            raise Distrusted("secret", f"another secret of run {hello.run}: bring the file of gossamer wan secret to all sites of the run")
        self._check(Caller(hello.site, hello.run, certificate))
        mine, public = G.new_key()
        name = secrets.token_hex(G.SESSION_BYTES)
        self._keep(name, _Session(hello.site, hello.run, G.session_key(mine, hello.key, secret, raw, name), G.Window()))
        listed = signature = None
        if (identity := self._identity) is not None:
            signature = identity.sign(G.said(raw, name, public, self.site)).hex()
            if (pem := self._newer_than(hello.revocations)) is not None:
                listed = pem.decode()
        welcome = G.Welcome(
            site=self.site,
            epoch=party.roster.epoch,
            session=name,
            key=public,
            listed=identity.revocations.number if identity else 0,
            revocations=listed,
            certificate=identity.certificate.pem.decode() if identity else None,
            signature=signature,
        )
        return G.pack(welcome, secret, "welcome", raw)

    def _compared(self, raw: bytes) -> tuple[G.Hello, Party]:
        """A greeting of this version, run, configuration and layout."""
        if (version := G.protocol_of(raw)) not in (None, PROTOCOL):
            raise Distrusted("version", f"it speaks protocol version {version}, site {self.site} version {PROTOCOL}: run one release")
        hello = G.unpack(G.Hello, raw, G.MAX_HELLO_BYTES)
        if (party := self._find(hello.run)) is None:
            raise Distrusted("run", f"run {hello.run} is not one of site {self.site}: check the run id, and the address")
        if hello.to not in (None, self.site):
            raise Distrusted("site", f"a greeting for site {hello.to}, and this is site {self.site}: check the address")
        self._compare(hello, "configuration", hello.configuration, party.terms.configuration)
        self._compare(hello, "layout", hello.layout, party.terms.layout)
        return hello, party

    def _compare(self, hello: G.Hello, what: Literal["configuration", "layout"], theirs: str | None, ours: str | None) -> None:
        if ours is not None and theirs != ours:
            words = {"configuration": "configuration", "layout": "parameter layout"}[what]
            raise Distrusted(
                what,
                f"the {words} of site {hello.site} is {theirs or 'unknown'}, that of site {self.site} is {ours}: "
                f"run {hello.run} needs one configuration and one release on all sites",
            )

    def _keep(self, name: str, session: _Session) -> None:
        with self._lock:
            self._sessions[name] = session
            mine = [k for k, s in self._sessions.items() if (s.site, s.run) == (session.site, session.run)]
            for old in mine[:-MAX_SESSIONS_EACH]:
                del self._sessions[old]
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _turned_away(self, error: Distrusted, who: str) -> None:
        """Whoever is refused for a certificate may have calls open: they end before it can end them itself, and so with the reason."""
        self._say(error, who)
        if error.of_certificate:
            self.look()

    def _say(self, error: Distrusted, who: str) -> None:
        if error.reason == "session":  # they end with every restart: no news
            return
        with self._lock:
            if (who, error.reason) in self._logged or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add((who, error.reason))
            full = len(self._logged) == MAX_LOGGED
        log.warning("refused: %s: %s%s", who, error, "; further refusals are not logged" if full else "")

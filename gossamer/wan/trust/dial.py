"""The caller's side of trust: one peer, the session with it, and channels on which every call is made in it and every answer is checked.

    dial = Dial(Party(terms, roster), "lyon", "192.0.2.7:7000", "oslo", identity)
    dial.open(timeout_s=10)                                        # optional: else the first call greets
    channel = dial.channel((("grpc.use_local_subchannel_pool", 1),))
    channel.unary_unary("/gossamer.X/Y")(b"...", timeout=5)

    await dial.aio_open(timeout_s=10)                              # the same with grpc.aio
    channel = dial.aio_channel()
    await channel.unary_unary("/gossamer.X/Y")(b"...", timeout=5)

TLS checks that the peer is the site that was meant, whatever its address. What is refused raises Distrusted, which is a grpc.RpcError. A
stream is believed from its first message on.

`look` ends what is under way to a peer whose certificate was revoked, or has come to its end: to be called now and then. A greeting brings
the newer of the two lists of revoked certificates to the other side, and there is a new greeting whenever this side's has changed.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

import grpc
import grpc.aio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gossamer.core.errors import BadInput
from gossamer.wan.roster.messages import printable
from gossamer.wan.roster.records import PROTOCOL
from gossamer.wan.trust import greeting as G
from gossamer.wan.trust.certificates import Certificate, Identity, site_name
from gossamer.wan.trust.diagnose import diagnose
from gossamer.wan.trust.terms import REFUSED_KEY, Distrusted, Party, Reason, check_plain, mac, same

if TYPE_CHECKING:
    from gossamer.wan.trust.aio_calls import AioChannel

HELLO_TIMEOUT_S = 10.0
"""Of a greeting that comes of a call without a time-out."""
_LEARN_S, _LEARN_AGAIN_S = 2.0, 5.0
_SUSPICIOUS = ("andshake", "Socket closed", "Verification", "ertificate", "reset by peer")
"""What gRPC says when TLS did not come about, among other cases."""


class Made(NamedTuple):
    """One call of a session."""

    metadata: tuple[str, bytes]
    answer: bytes
    """What the initial metadata of the answer must hold."""


class Session:
    """What a greeting has agreed."""

    def __init__(self, name: str, key: bytes, site: str, certificate: Certificate | None, listed: int, lacking: bytes | None) -> None:
        self.site, self.certificate = site, certificate
        self.listed = listed
        """Number of the list of revoked certificates that this side had then."""
        self.lacking = lacking
        """That list, where the peer had an older one."""
        self._name, self._key = bytes.fromhex(name), key
        self._counter = 0
        self._lock = threading.Lock()

    def call(self, method: str) -> Made:
        """A further call."""
        with self._lock:
            self._counter += 1
            counter = self._counter
        shown = self._name + counter.to_bytes(G.COUNTER_BYTES, "big") + G.call_mac(self._key, method, counter)
        return Made((G.CALL_KEY, shown), G.answer_mac(self._key, method, counter))


class Calling(Protocol):
    """Calls that are under way."""

    @property
    def session(self) -> Session | None:
        """In which they were made."""

    def end(self, error: Distrusted) -> None:
        """Ends them. From any thread."""


class Dial:
    """One peer, as this process calls it. All channels share one session.

    Args:
        party: the run, as this process takes part in it. Its roster is asked before every call whether the peer is in it.
        me: the id of this site.
        address: host:port to dial.
        site: the id of the peer; None: whoever has a certificate for the host of the address.
        identity: certificate and key; None: loopback only, without TLS.

    Raises:
        BadInput: no certificate, and not a loopback address; or a certificate of another site.
    """

    def __init__(self, party: Party, me: str, address: str, site: str | None, identity: Identity | None) -> None:
        if identity is None:
            check_plain(address)
        elif identity.site != me:
            raise BadInput(f"site {me}: the certificate in {identity.folder} is for site {identity.site}: give this site's own folder")
        self.address = address
        self.relayed = False
        """The address is one of this machine, by which a relay is reached that leads to the peer."""
        self._party, self._me, self._site, self._identity = party, me, site, identity
        self._session: Session | None = None
        self._under_way: weakref.WeakSet[Any] = weakref.WeakSet()  # of Calling
        self._accused = False
        self._learned_s = -_LEARN_AGAIN_S
        self._lock = threading.Lock()
        self._greets = threading.Lock()
        self._aio_greets = asyncio.Lock()

    @property
    def site(self) -> str | None:
        """The peer: as given, or as it has shown itself."""
        session = self._session
        return self._site or (session.site if session else None)

    def channel(self, options: Sequence[tuple[str, Any]] = ()) -> Any:
        """A channel (grpc.Channel) of its own to the peer.

        Args:
            options: of gRPC, such as keepalive.
        """
        from gossamer.wan.trust.thread_calls import Interceptor

        raw = self._raw(grpc, options)
        return grpc.intercept_channel(raw, Interceptor(self, raw))

    def open(self, timeout_s: float = HELLO_TIMEOUT_S) -> str:
        """Greets the peer now, over a connection of its own, unless there is a session; returns its site id.

        Raises:
            Distrusted: refused, or not believed.
            grpc.RpcError: not reached.
        """
        with self._raw(grpc, ()) as raw:
            return self.greeted(raw, timeout_s).site

    def aio_channel(self, options: Sequence[tuple[str, Any]] = ()) -> AioChannel:
        """As `channel`, for grpc.aio."""
        from gossamer.wan.trust.aio_calls import AioChannel

        return AioChannel(self, self._raw(grpc.aio, options))

    async def aio_open(self, timeout_s: float = HELLO_TIMEOUT_S) -> str:
        """As `open`."""
        async with self._raw(grpc.aio, ()) as raw:
            return (await self.aio_greeted(raw, timeout_s)).site

    # ---- to be called now and then

    def look(self) -> None:
        """Ends calls to a peer that is not to be believed any more. Where a peer says that this site's own certificate was revoked, it
        gets the list of which that is said, so as to see for itself: nobody is stopped by the word of another. And a service that may
        not be called for long, as a relay, is brought a newer list."""
        if (mine := self._identity) is None:
            return
        session, now_s = self._session, time.monotonic()
        brings = self._site is None and session is not None and session.listed != self._listed()
        if (self._accused or brings) and now_s - self._learned_s > _LEARN_AGAIN_S:
            self._learned_s = now_s
            with suppress(grpc.RpcError):
                if self._accused:
                    self._accused = False
                    self._learn(mine)
                else:
                    self.open(_LEARN_S)
        with self._lock:
            under_way: list[Calling] = list(self._under_way)
        for one in under_way:
            try:
                self._check_self()
                if (session := one.session) is not None:
                    self._check_certificate(session)
            except Distrusted as error:
                one.end(error)

    def _learn(self, mine: Identity) -> None:
        with self._raw(grpc, ()) as raw:
            if pem := raw.unary_unary(G.LIST)(mine.revocations.number.to_bytes(8, "big"), timeout=_LEARN_S):
                mine.revocations.offer(pem)

    # ---- for calls

    def under_way(self, calls: Calling) -> None:
        """These are, from now on, for as long as somebody holds them."""
        with self._lock:
            self._under_way.add(calls)

    def greeted(self, raw: Any, timeout_s: float | None) -> Session:
        """The session, checked for this moment; a new one, over a channel, where there is none."""
        with self._greets:
            if (session := self._session) is None or session.listed != self._listed():
                hello, key = self._hello()
                timeout_s = HELLO_TIMEOUT_S if timeout_s is None else timeout_s
                try:
                    answer = raw.unary_unary(G.HELLO)(hello, timeout=timeout_s)
                except grpc.RpcError as error:
                    raise self._in_words(error) from None
                session = self._welcomed(answer, hello, key)
                if (bring := session.lacking) is not None:
                    with suppress(grpc.RpcError):
                        raw.unary_unary(G.TAKE)(bring, metadata=(session.call(G.TAKE).metadata,), timeout=timeout_s)
                self._session = session
        self._check(session)
        return session

    async def aio_greeted(self, raw: Any, timeout_s: float | None) -> Session:
        """As `greeted`."""
        async with self._aio_greets:
            if (session := self._session) is None or session.listed != self._listed():
                hello, key = self._hello()
                timeout_s = HELLO_TIMEOUT_S if timeout_s is None else timeout_s
                try:
                    answer = await raw.unary_unary(G.HELLO)(hello, timeout=timeout_s)
                except grpc.RpcError as error:
                    raise await asyncio.to_thread(self._in_words, error) from None
                session = self._welcomed(answer, hello, key)
                if (bring := session.lacking) is not None:
                    with suppress(grpc.RpcError):
                        await raw.unary_unary(G.TAKE)(bring, metadata=(session.call(G.TAKE).metadata,), timeout=timeout_s)
                self._session = session
        self._check(session)
        return session

    def refused(self, error: Any, session: Session) -> Any:
        """The error of a call, as Distrusted if the peer has refused it. Where the session is over, the next call greets again."""
        found = refusal(error)
        if found and found.reason == "session" and self._session is session:
            self._session = None
        self._accused = self._accused or (found is not None and found.reason == "revoked" and found.said)
        return found or error

    def believe(self, metadata: Any, made: Made, session: Session) -> None:
        """Checks the initial metadata of an answer.

        Raises:
            Distrusted: it is not the peer's.
        """
        shown = [value for key, value in metadata or () if key == G.ANSWER_KEY]
        if len(shown) != 1 or not isinstance(shown[0], bytes) or not same(shown[0], made.answer):
            raise Distrusted("answer", f"the answer from {self.address} is not that of site {session.site}: it is not believed")

    # ---- within

    def _check(self, session: Session) -> None:
        """That this site and the peer are to be believed now."""
        self._check_self()
        try:
            self._check_certificate(session)
        except Distrusted:
            self._session = None  # it may have another certificate by now
            raise
        roster = self._party.roster
        if not roster.allows(session.site):
            run = self._party.terms.run
            at = "by the relay" if self.relayed else f"at {self.address}"
            raise Distrusted("site", f"site {session.site} {at} is not in the roster of run {run} (epoch {roster.epoch})")

    def _check_certificate(self, session: Session) -> None:
        if session.certificate is not None and self._identity and (fault := session.certificate.fault(self._identity.revocations)):
            raise Distrusted(*fault)

    def _check_self(self) -> None:
        if self._identity and (fault := self._identity.certificate.fault(self._identity.revocations)):
            raise Distrusted(fault[0], fault[1], own=True)

    def _listed(self) -> int:
        """Number of the list of revoked certificates, as of now."""
        if self._identity is None:
            return 0
        self._identity.revocations.refresh()
        return self._identity.revocations.number

    def _raw(self, side: Any, options: Sequence[tuple[str, Any]]) -> Any:
        if (mine := self._identity) is None:
            return side.insecure_channel(self.address, options=list(options))
        pinned = [("grpc.ssl_target_name_override", site_name(self._site))] if self._site else []
        credentials = grpc.ssl_channel_credentials(mine.authority_pem, mine.key_pem, mine.certificate.pem)
        return side.secure_channel(self.address, credentials, options=[*options, *pinned])

    def _hello(self) -> tuple[bytes, X25519PrivateKey]:
        self._check_self()
        terms, mine = self._party.terms, self._identity
        key, public = G.new_key()
        hello = G.Hello(
            protocol=PROTOCOL,
            run=terms.run,
            site=self._me,
            to=self._site,
            configuration=terms.configuration,
            layout=terms.layout,
            revocations=mine.revocations.number if mine else 0,
            key=public,
        )
        return G.pack(hello, terms.secret, "hello"), key

    def _welcomed(self, answer: bytes, hello: bytes, key: X25519PrivateKey) -> Session:
        terms, mine = self._party.terms, self._identity
        welcome = G.unpack(G.Welcome, answer, G.MAX_WELCOME_BYTES)
        if not same(answer[: G.MAC_BYTES], mac(terms.secret, "welcome", hello, answer[G.MAC_BYTES :])):
            raise Distrusted("answer", f"{self.address} does not know the secret of run {terms.run}: it is not a site of the run")
        if self._site is not None and welcome.site != self._site:
            raise Distrusted("answer", f"{self.address} is site {welcome.site}, expected site {self._site}: check the address")
        certificate = self._shown(welcome, hello) if mine else None
        if mine and welcome.revocations is not None:
            mine.revocations.offer(welcome.revocations.encode())
        agreed = G.session_key(key, welcome.key, terms.secret, hello, welcome.session)
        number, pem = (mine.revocations.number, mine.revocations.pem) if mine else (0, b"")
        lacking = pem if welcome.listed < number and len(pem) <= G.MAX_LIST_BYTES else None
        return Session(welcome.session, agreed, welcome.site, certificate, number, lacking)

    def _shown(self, welcome: G.Welcome, hello: bytes) -> Certificate:
        """The certificate of which the peer has shown that it holds the key."""
        assert self._identity is not None
        try:
            found = Certificate.parse((welcome.certificate or "").encode())
            found.check_issued_by(self._identity.authority_pem)
        except ValueError as error:
            raise Distrusted("answer", f"site {welcome.site} at {self.address} shows a certificate that cannot be used ({error})") from None
        message = G.said(hello, welcome.session, welcome.key, welcome.site)
        if found.site != welcome.site or not found.verify(bytes.fromhex(welcome.signature or ""), message):
            raise Distrusted("answer", f"{self.address} says that it is site {welcome.site}, and has not the key of its certificate")
        return found

    def _in_words(self, error: Any) -> Any:
        """The error of a greeting, with the reason where one can be found."""
        if found := refusal(error):
            self._accused = self._accused or found.reason == "revoked"
            return found
        details = str(error.details() or "")
        if self._identity and error.code() == grpc.StatusCode.UNAVAILABLE and any(word in details for word in _SUSPICIOUS):
            with suppress(OSError):
                if words := diagnose(self.address, self._identity, self._site):
                    return Distrusted("certificate", words)
        return error


def refusal(error: Any) -> Distrusted | None:
    """What a peer's guard said, in an error of gRPC; None: it is another error."""
    if isinstance(error, Distrusted):
        return error
    for key, value in error.trailing_metadata() or ():
        if key == REFUSED_KEY and value in get_args(Reason):
            return Distrusted(value, printable(str(error.details() or "")), said=True)
    return None

"""`gossamer wan check`: whether a site can take part from where it is, what is wrong in plain words, and what to do about it.

    for finding in Check(channel, "lyon", "203.0.113.5:7400", "0.0.0.0:7001", "198.51.100.7:7001", identity).run():
        print(finding)

In order: this site's certificate; the coordinator's name, port, certificate and answer; whether there is a router with address translation
in between; the address to bind, the address to advertise, and whether the coordinator reaches it there; round trip and rates. What cannot
be known any more after a failure is left out. Dates of certificates are compared with this machine's clock; no two clocks are compared.
"""

from __future__ import annotations

import re
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import grpc
from pydantic import ValidationError

from gossamer.core.errors import BadInput
from gossamer.wan import dialback as D
from gossamer.wan.findings import Finding, ok, way_to, wrong
from gossamer.wan.roster.messages import Refusal, pack, printable, unpack
from gossamer.wan.trust.certificates import Identity, date, now_utc
from gossamer.wan.trust.diagnose import diagnose, shown
from gossamer.wan.trust.guard import Guard
from gossamer.wan.trust.terms import Distrusted, check_address, host_of, is_loopback

CALL_S = 15.0
_SOON = timedelta(days=14)
_ANSWERS = 9
_RELAY = "or use a relay: gossamer wan relay on a machine that can be dialled, and --relay HOST:PORT here"
_EXAMPLES = [ip_network(of) for of in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")]

Channel = Callable[[Any], Any]


class Stop(Exception):
    """Nothing more can be found out."""


def no_coordinator(address: str, error: Distrusted) -> str:
    """For a site that has answered in place of a coordinator: it does not know the run that is named when none is meant."""
    found = re.search(r"is not one of site ([a-z0-9-]{1,63})", str(error))
    whose = f"the port of site {found[1]}, not of" if found else "not"
    return f"{address} is {whose} a coordinator: give the address of gossamer wan coordinator (port 7400, where --bind says nothing else)"


class Check:
    """One check of one site.

    Args:
        channel: makes a channel of gRPC (with threads) to the coordinator, in a session with it (a Dial's, or `calls.plain`).
        bind, advertise: as for `gossamer wan join`; without `bind` this site only dials out.
        identity: this site's; None: loopback.
        seconds: how long each rate is measured; 0: not at all.

    Raises:
        BadInput: an address is none, or contradicts another.
    """

    def __init__(
        self,
        channel: Channel,
        site: str,
        coordinator: str,
        bind: str | None,
        advertise: str | None,
        identity: Identity | None,
        *,
        seconds: float = 2.0,
    ) -> None:
        self._channel, self._site, self._coordinator, self._identity = channel, site, coordinator, identity
        self._host, self._port = check_address("--coordinator", coordinator)
        if advertise is not None and bind is None:
            raise BadInput(f"--advertise {advertise}, and this site listens nowhere: give --bind too, such as 0.0.0.0:7001")
        if bind is not None:
            check_address("--bind", bind)
        self._bind, self._advertise = bind, advertise if advertise is not None else bind
        if self._advertise is not None:
            check_address("--advertise", self._advertise)
        if not 0 <= seconds <= D.MOST_S:
            raise BadInput(f"--seconds {seconds:g}: expected 0 to {D.MOST_S:g}")
        self._seconds = seconds

    def run(self) -> Iterator[Finding]:
        """The findings, as they come."""
        with suppress(Stop):
            yield from self._own()
            yield from self._reach()
            yield from self._certificates()
            with self._channel((("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 4 << 20))) as channel:
                looked = yield from self._answers(channel)
                yield from self._translated(looked)
                yield from self._back(channel, looked)
                yield from self._rates(channel)

    # ---- this site and the way to the coordinator

    def _own(self) -> Iterator[Finding]:
        if self._identity is None:
            yield ok("certificate", "none: fine on one machine, and nowhere else")
            return
        mine = self._identity.certificate
        if mine.site != self._site:
            yield wrong(
                "certificate", f"it is for site {mine.site}, and this is site {self._site}", "give this site's own folder with --identity"
            )
            raise Stop
        text = f"site {mine.site}, good until {date(mine.ends)}"
        if mine.ends - now_utc() < _SOON:
            yield Finding("warning", "certificate", text, f"make another soon: gossamer wan ca issue {mine.site} --out DIR")
        else:
            yield ok("certificate", text)

    def _reach(self) -> Iterator[Finding]:
        finding = way_to("coordinator", self._coordinator)
        yield finding
        if finding.level == "wrong":
            raise Stop

    def _certificates(self) -> Iterator[Finding]:
        if self._identity is None:
            return
        what = "TLS"
        if words := diagnose(self._coordinator, self._identity, None, D.DIAL_S):
            text, _, remedy = words.rpartition(": ")
            yield wrong(what, text, remedy)
            raise Stop
        theirs = shown(self._coordinator, self._identity, D.DIAL_S)
        if theirs is None:
            yield wrong(what, f"{self._coordinator} ends the connection", "look into the log of the coordinator")
            raise Stop
        text = f"both sides believe each other; there is {theirs.site}, its certificate good until {date(theirs.ends)}"
        if theirs.ends - now_utc() < _SOON:
            yield Finding("warning", what, text, f"make another soon: gossamer wan ca issue {theirs.site} --out DIR")
        else:
            yield ok(what, text)

    def _answers(self, channel: Any) -> Any:
        what, times_s = "answer", []
        for _ in range(_ANSWERS):
            begun_s = time.perf_counter()
            try:
                looked = unpack(D.Looked, channel.unary_unary(f"/{D.SERVICE}/Look")(pack(D.Look(site=self._site)), timeout=CALL_S))
            except grpc.RpcError as error:
                yield self._refused(what, error)
                raise Stop from None
            times_s.append(time.perf_counter() - begun_s)
        yield ok(what, f"the coordinator knows this site; round trip {1e3 * statistics.median(times_s):.1f} ms")
        return looked

    def _refused(self, what: str, error: Any) -> Finding:
        if isinstance(error, Distrusted):
            if error.reason == "run":
                text, _, remedy = no_coordinator(self._coordinator, error).partition(": ")
                return wrong(what, text, remedy)
            text, _, remedy = str(error).rpartition(": ")
            return wrong(what, text or str(error), remedy if text else "see docs/wan.md, what is refused")
        code, details = error.code(), str(error.details() or "")
        with suppress(ValidationError):
            return wrong(what, printable(Refusal.model_validate_json(details).text), "wait, and check again")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return wrong(
                what, f"{self._coordinator} is a service of gRPC, and no coordinator of this release", "check the port; run one release"
            )
        if code == grpc.StatusCode.UNAUTHENTICATED or "session" in details:
            return wrong(what, f"the coordinator wants certificates ({details[:200]})", "give --identity")
        return wrong(
            what, f"{self._coordinator} accepts connections, and does not speak as a coordinator does ({details[:200]})", "check the port"
        )

    # ---- the way back

    def _translated(self, looked: D.Looked) -> Iterator[Finding]:
        mine = self._own_address()
        if mine is None or D.plain_ip(mine) == D.plain_ip(looked.source):
            yield ok("address", f"the coordinator sees this machine's own address, {looked.source}")
            return
        text = f"this machine is {mine}, and the coordinator sees {looked.source}: a router between them translates addresses (NAT)"
        if self._bind is None:
            yield ok("address", text)
        else:
            yield Finding(
                "warning", "address", text, f"have the router forward the port to {mine}, and advertise {looked.source}; {_RELAY}"
            )

    def _own_address(self) -> str | None:
        """From which this machine would call the coordinator."""
        for family, kind, _, _, where in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as one:
                one.connect(where)  # sends nothing
                return str(one.getsockname()[0])
        return None

    def _back(self, channel: Any, looked: D.Looked) -> Iterator[Finding]:
        if self._bind is None or self._advertise is None:
            yield Finding(
                "ok",
                "dialling",
                f"this site only dials out: it reaches sites that listen; to reach others that only dial out, {_RELAY[3:]}",
            )
            return
        if (fault := self._advertised(looked)) is not None:
            yield fault
            if fault.level == "wrong":
                return
        nonce = secrets.token_hex(16)
        try:
            with self._listening(nonce):
                yield ok("bind", f"{self._bind} can be bound")
                asked = pack(D.Back(site=self._site, address=self._advertise))
                dialled = unpack(D.Dialled, channel.unary_unary(f"/{D.SERVICE}/Back")(asked, timeout=4 * D.DIAL_S + CALL_S))
        except BadInput as error:
            yield wrong("bind", str(error), "stop what listens there (this site itself?), or bind another port")
            return
        except grpc.RpcError as error:
            yield self._refused("dial back", error)
            return
        yield self._dialled(dialled, looked, nonce)

    def _advertised(self, looked: D.Looked) -> Finding | None:
        """What is wrong with the advertised address as such."""
        assert self._advertise is not None
        what, host, far = "advertise", host_of(self._advertise), not is_loopback(self._host)
        ip = D.plain_ip(host)
        such = "" if D.plain_ip(looked.source) == ip else f", such as {looked.source}:{self._advertise.rpartition(':')[2]}"
        use = f"advertise an address that the other sites can dial{such}; {_RELAY}"
        if ip is not None and ip.is_unspecified:
            return wrong(what, f"{self._advertise} means all addresses of a machine, and is none that can be dialled", use)
        if self._identity is None and not far and not is_loopback(host):
            return wrong(
                what, f"{self._advertise} is not loopback, and there is no certificate", "give --identity DIR, or leave --advertise out"
            )
        if far and is_loopback(host):
            return wrong(what, f"{self._advertise} is loopback: every machine calls itself so", use)
        if far and ip is not None and ip.is_link_local:
            return wrong(what, f"{self._advertise} is an address of one network segment alone", use)
        if far and ip is not None and any(ip in network for network in _EXAMPLES):
            text = f"{self._advertise} is of a network that is for examples in documentation: no machine on the internet has it"
            return Finding("warning", what, text, use)
        there = D.plain_ip(looked.source)
        if far and ip is not None and ip.is_private and there is not None and not there.is_private:
            return wrong(what, f"{self._advertise} is a private address, which sites in other networks cannot dial", use)
        if far and ip is not None and ip.is_private:
            return Finding("warning", what, f"{self._advertise} is a private address: good for sites of this network or VPN alone", use)
        return None

    def _dialled(self, d: D.Dialled, looked: D.Looked, nonce: str) -> Finding:
        what, at = "dial back", self._advertise or ""
        host, port = host_of(at), at.rpartition(":")[2]
        if d.result == "answers" and d.nonce == nonce:
            return ok(what, f"the coordinator reaches this site at {at}")
        if d.result == "answers":
            return wrong(what, f"at {at} another process of site {self._site} answers", "stop it, or correct the address to advertise")
        if d.result == "unresolved":
            return wrong(
                what,
                f"the coordinator cannot resolve {host} ({d.text})",
                f"advertise a public name, or an address such as {looked.source}:{port}",
            )
        if d.result == "refused":
            return wrong(
                what,
                f"the coordinator reaches {host}, and nothing listens there at port {port}",
                f"have the router forward port {port} to this machine's {self._bind}, or correct --advertise; {_RELAY}",
            )
        if d.result == "filtered":
            return wrong(
                what,
                f"nothing comes back from {at}: a firewall drops the packets, or a router does not forward them",
                f"open TCP port {port} for incoming connections, here, in the cloud's security group, in the router; {_RELAY}",
            )
        if d.result == "unreachable":
            return wrong(
                what, f"the coordinator has no way to {at} ({d.text})", f"correct --advertise, for example {looked.source}:{port}; {_RELAY}"
            )
        if d.result == "not_yours":
            known = host if d.text == host else f"{host} ({d.text})"
            return wrong(
                what,
                f"this site's calls come from {looked.source}, not from {known}: the coordinator dials back no other address",
                f"correct --advertise; or have {host} written into the certificate, with gossamer wan ca issue --host {host}",
            )
        return wrong(
            what, f"at {at} somebody else answers: {d.text}", f"find out what listens at port {port}, or bind and advertise another port"
        )

    @contextmanager
    def _listening(self, nonce: str) -> Iterator[None]:
        """Answers at the address to bind.

        Raises:
            BadInput: it cannot be bound.
        """
        assert self._bind is not None
        server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024)])
        answer = grpc.unary_unary_rpc_method_handler(lambda request, context: nonce.encode())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(D.SERVICE, {"Answer": answer}),))
        Guard(self._site, lambda run: None, self._identity).listen(server, self._bind)
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()

    # ---- rates

    def _rates(self, channel: Any) -> Iterator[Finding]:
        if not self._seconds:
            return
        try:
            up, down = self._up(channel), self._down(channel)
        except grpc.RpcError as error:
            yield self._refused("rate", error)
            return
        yield ok(
            "rate",
            f"one connection, {self._seconds:g} s each way: {8e-6 * up:.1f} Mbit/s to the coordinator, {8e-6 * down:.1f} Mbit/s from it",
        )

    def _up(self, channel: Any) -> float:
        piece = secrets.token_bytes(D.PIECE_BYTES)
        begun_s = time.perf_counter()

        def pieces() -> Iterator[bytes]:
            while time.perf_counter() - begun_s < self._seconds:
                yield piece

        taken = unpack(D.Taken, channel.stream_unary(f"/{D.SERVICE}/Up")(pieces(), timeout=D.MOST_S + CALL_S))
        return taken.nbytes / (time.perf_counter() - begun_s)

    def _down(self, channel: Any) -> float:
        begun_s, nbytes = time.perf_counter(), 0
        asked = pack(D.Measure(seconds=self._seconds))
        for piece in channel.unary_stream(f"/{D.SERVICE}/Down")(asked, timeout=D.MOST_S + CALL_S):
            nbytes += len(piece)
        return nbytes / (time.perf_counter() - begun_s)

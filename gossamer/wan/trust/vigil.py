"""What a process looks at as long as it runs: whether the list of revoked certificates has changed, and whether a certificate has ended.

    vigil = Vigil(identity, [guard.look, dial.look], on_fault=lambda error: ...)
    ...
    vigil.close()

What is not good any more is ended within `EVERY_S`, in both directions, and not at its next call: there may be none for hours.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from gossamer.wan.trust.certificates import Identity, date, now_utc
from gossamer.wan.trust.terms import Distrusted

log = logging.getLogger("gossamer.wan.trust")

EVERY_S = 0.5
_WARN_DAYS = (14, 7, 3, 1)
"""So many days before this process's certificate ends, the log says so."""


class Vigil:
    """Looks twice a second, in a thread of its own.

    Args:
        identity: of this process; None: there are no certificates, and nothing to look at.
        looks: what is to be called each time.
        on_fault: told once, when this process's own certificate is not good any more: it was revoked, or has come to its end.
    """

    def __init__(
        self, identity: Identity | None, looks: Sequence[Callable[[], None]], on_fault: Callable[[Distrusted], None] = lambda error: None
    ) -> None:
        self._identity, self._looks, self._on_fault = identity, tuple(looks), on_fault
        self._over = threading.Event()
        self._warned = len(_WARN_DAYS) if identity is None else self._due(identity)  # loading it has said so
        self._thread = threading.Thread(target=self._run, name="wan-vigil", daemon=True)
        if identity is not None:
            self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(3.0)

    def _run(self) -> None:
        assert self._identity is not None
        told = False
        while not self._over.wait(EVERY_S):
            for look in self._looks:
                try:
                    look()
                except Exception:  # whatever it is, the others are to be looked at
                    log.exception("looking after certificates has failed")
            if not told and (fault := self._identity.certificate.fault(self._identity.revocations)) is not None:
                told = True
                self._on_fault(Distrusted(*fault, own=True))
            self._warn(self._identity)

    def _warn(self, identity: Identity) -> None:
        if (due := self._due(identity)) > self._warned:
            self._warned = due
            certificate = identity.certificate
            log.warning(
                "%s: expires on %s: gossamer wan ca issue %s, and start this again with the new folder before that",
                identity.folder,
                date(certificate.ends),
                certificate.site,
            )

    @staticmethod
    def _due(identity: Identity) -> int:
        left = identity.certificate.ends - now_utc()
        return sum(left < timedelta(days=days) for days in _WARN_DAYS)

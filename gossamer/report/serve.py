"""The page of a run that goes on, on this machine alone: http://127.0.0.1:PORT/, made anew when the files of the run have changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.report.live import load, version
from gossamer.report.page import render

HOST = "127.0.0.1"
REST, MOST_REST_S = 4.0, 10.0
"""A page is made anew after so many times as long as the last one took, or after this: whoever looks costs little."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Live:
    """The newest page of a run folder. Any thread may ask for it.

    Args:
        make: the page, from the folder and its mark.
    """

    def __init__(self, folder: Path, make: Callable[[Path, str], str] | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._make = make or (lambda folder, mark: render([load(folder)], version=mark))
        self._now_s = now_s
        self._lock = threading.Lock()
        self._mark, self._page = "", ""
        self._rest_until_s = 0.0

    def mark(self) -> str:
        """What the newest page is made of; that of the one there is, while it is too early for another."""
        if self._page and self._now_s() < self._rest_until_s:
            return self._mark
        return version(self.folder)

    def page(self) -> str:
        """The page. Where the run cannot be read at this moment, the last one that could be; if none could, what is wrong."""
        with self._lock:
            mark = self.mark()
            if mark != self._mark or not self._page:
                begin_s = self._now_s()
                try:
                    self._page, self._mark = self._make(self.folder, mark), mark
                except (BadInput, OSError) as error:
                    if not self._page:
                        return f'<!doctype html><meta http-equiv="refresh" content="2"><title>Gossamer</title><p>{escape(str(error))}</p>'
                end_s = self._now_s()
                self._rest_until_s = end_s + min(MOST_REST_S, REST * (end_s - begin_s))
            return self._page


class _Quiet(ThreadingHTTPServer):
    """A terminal that shows the run has no room for those who ask, and are gone before they have the answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Server:
    """Serves a run folder's page until closed.

    Args:
        port: 0 takes one that is free.

    Raises:
        BadInput: the port cannot be had.
    """

    def __init__(self, live: Live, port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self._own():
                    self.send_error(403, "ask for http://127.0.0.1")
                elif self.path == "/":
                    self._say(live.page(), "text/html")
                elif self.path == "/version":
                    self._say(live.mark(), "text/plain")
                elif self.path == "/favicon.ico":
                    self.send_response(204)
                    self.end_headers()
                else:
                    self.send_error(404)

            def _own(self) -> bool:
                """Whether it was asked for by the name of this machine: not by a page from elsewhere, whose name points here."""
                return self.headers.get("Host", "").rpartition(":")[0] in (HOST, "localhost")

            def _say(self, text: str, kind: str) -> None:
                data = text.encode("utf-8", errors="replace")
                self.send_response(200)
                for key, value in (
                    ("Content-Type", f"{kind}; charset=utf-8"),
                    ("Content-Length", str(len(data))),
                    ("Cache-Control", "no-store"),
                    ("Content-Security-Policy", _POLICY),
                    ("X-Content-Type-Options", "nosniff"),
                ):
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """A terminal that shows the run has no room for it."""

        try:
            self._server = _Quiet((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise BadInput(f"--port {port} cannot be had on {HOST} ({error}): take another, or 0 for one that is free") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_port}/"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)

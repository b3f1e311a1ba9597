"""Logs of wide-area runs, on stderr: one line for each message, in text or as an object of JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

from gossamer.core.terminal import own_line

Format = Literal["text", "json"]


@dataclass
class LogPlace:
    """Where a process is in its run: stands in each line of its log. Set the fields when they change."""

    site: str
    run: str
    session: int | None = None
    round: int | None = None


def set_up_logs(format: Format, *, site: str, run: str, file: TextIO | None = None, level: int = logging.INFO) -> LogPlace:
    """Logs of Gossamer as one line each, with site, run, session and round. A later call in a process replaces the first.

    Args:
        format: text: `14:03:05 WARNING wan.link site=lyon run=r session=3 round=17 what happened`; json: one object a line, with the keys
            time (UTC), level, logger, site, run, session, round, message, and error where there was a traceback. Then whatever goes to
            stderr is such a line: warnings, what libraries log, errors that nobody caught.
        file: stderr by default.

    Returns:
        To be kept up to date by the caller.
    """
    place = LogPlace(site, run)
    handler = _Stderr() if file is None else logging.StreamHandler(file)
    handler.setFormatter(_Json(place) if format == "json" else _Text(place))
    logger, root = logging.getLogger("gossamer"), logging.getLogger()
    for old in list(logger.handlers):
        logger.removeHandler(old)
        root.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    if format == "json":
        root.addHandler(handler)
        logging.captureWarnings(True)
        warnings.simplefilter("default")
        sys.excepthook = _uncaught
        threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    return place


def ends_with(text: str) -> bool:
    """The last word of a process, as an object; False: its log is none of objects, and nothing was said."""
    logger = logging.getLogger("gossamer")
    if not any(isinstance(handler.formatter, _Json) for handler in logger.handlers):
        return False
    logger.error("%s", text)
    return True


def note(text: str) -> None:
    """A line on stderr: for people, or an object where the log is one of objects."""
    if not ends_with(text):
        print(own_line(text, sys.stderr), end="", file=sys.stderr, flush=True)


def loading(format: Format, site: str) -> None:
    """That there is nothing to see yet: what the command needs is loaded first, which takes a while."""
    text = "loading ..."
    if format == "json":
        set_up_logs(format, site=site, run="-")
        logging.getLogger("gossamer").info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


class _Stderr(logging.StreamHandler[TextIO]):
    """To what stderr is when there is something to say: while a progress line is shown in a terminal, that leads to the place above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    logging.getLogger("gossamer").critical("%s", f"{kind.__name__}: {error}", exc_info=(kind, error, trace) if error is not None else None)


class _Text(logging.Formatter):
    def __init__(self, place: LogPlace) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        p, at = self._place, time.strftime("%H:%M:%S", time.localtime(record.created))
        where = f"site={p.site} run={p.run} session={_dash(p.session)} round={_dash(p.round)}"
        text = _one_line(record.getMessage() + (f": {self.formatException(record.exc_info)}" if record.exc_info else ""))
        return f"{at} {record.levelname} {record.name.removeprefix('gossamer.')} {where} {text}"


class _Json(logging.Formatter):
    def __init__(self, place: LogPlace) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        p = self._place
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "site": p.site,
            "run": p.run,
            "session": p.session,
            "round": p.round,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _one_line(text: str) -> str:
    """Whatever a peer has said ends no line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

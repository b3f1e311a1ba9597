"""The loggers themselves: TensorBoard, Weights & Biases, trackio. Each is opened, fed and closed in a thread of its own (loggers.py)."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gossamer.app.folder import write_atomically
from gossamer.app.settings.log import LogSection
from gossamer.app.tracking.series import Row
from gossamer.core.errors import BadInput

STATE = "loggers.json"
"""Of a run folder: under which ids loggers know the run, so that one which goes on is the same run there."""
_KEEPING = threading.Lock()


class Sink(Protocol):
    """One logger of one run. What it raises ends the logging there, and nothing else."""

    def log(self, row: Row) -> None:
        """Shows numbers at their place."""

    def back_to(self, tokens: int) -> None:
        """The run goes on from there: what was shown of later did not happen."""

    def close(self) -> None:
        """Hands over what waits."""


@dataclass(frozen=True)
class Run:
    """What a logger is told of a run.

    Args:
        folder: the run folder.
        group: of the runs that belong together, such as those of the sites of one job; empty: none.
        config: the whole configuration, as nested tables.
    """

    folder: Path
    project: str
    name: str
    group: str = ""
    offline: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def known(self) -> dict[str, str]:
        """The ids that earlier processes of this run have kept."""
        try:
            return dict(json.loads((self.folder / STATE).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def keep(self, sink: str, name: str) -> None:
        """Keeps an id. Each logger has a thread of its own, so several may do so at once."""
        with _KEEPING:
            write_atomically(self.folder / STATE, json.dumps(self.known() | {sink: name}) + "\n")


class TensorBoard:
    """Event files in `tensorboard/` of the run folder. The step is the planned tokens of all workers; `progress/round` tells the round."""

    def __init__(self, run: Run) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        folder = run.folder / "tensorboard"
        fresh = not folder.is_dir() or not any(folder.iterdir())
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if fresh:
            self.back_to(-1)  # readers take a second start, not the first, for one that drops what came after

    def log(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        values.append(self._summary.Value(tag="progress/round", simple_value=row.round))
        self._add(step=row.tokens, summary=self._summary(value=values))

    def back_to(self, tokens: int) -> None:
        self._add(step=tokens + 1, session_log=self._session(status=self._session.START))  # readers drop all from this step on

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **what))


class Wandb:
    """A run of Weights & Biases, in `wandb/` of the run folder. `tokens` and `round` are columns, and the first is the x axis."""

    def __init__(self, run: Run) -> None:
        import wandb

        known = run.known().get("wandb")
        mark = known or uuid.uuid4().hex[:8]
        if known is None:
            run.keep("wandb", mark)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=mark,
            group=run.group or None,
            dir=str(run.folder.resolve()),
            config=dict(run.config),
            mode="offline" if run.offline else None,
            resume="allow" if known and not run.offline else None,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def log(self, row: Row) -> None:
        self._run.log({**row.values, "tokens": row.tokens, "round": row.round})

    def back_to(self, tokens: int) -> None:
        """Rows stay where they are: those that come again have the same tokens."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, in its own folder (TRACKIO_DIR), or wherever its environment variables send it. The step is the tokens."""

    def __init__(self, run: Run) -> None:
        import trackio

        known = run.known().get("trackio")
        self._run = trackio.init(
            project=run.project,
            name=known or run.name,
            group=run.group or None,
            config=dict(run.config),
            resume="allow" if known else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        if known is None:
            run.keep("trackio", self._run.name)

    def log(self, row: Row) -> None:
        self._run.log({**row.values, "round": row.round}, step=row.tokens)

    def back_to(self, tokens: int) -> None:
        """Rows stay where they are: those that come again have the same tokens."""

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Run], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""The loggers by the names that `log.to` knows, which are those of their libraries."""


def check_loggers(section: LogSection) -> None:
    """Refuses loggers whose library is not there, before anything is made.

    Raises:
        BadInput: naming what to install.
    """
    missing = [name for name in section.to if (spec := find_spec(name)) is None or spec.origin is None]  # a folder wandb/ is no library
    if missing:
        raise BadInput(
            f"log.to names {' and '.join(missing)}, and the library is not installed: pip install 'gossamer[loggers]', or leave it out"
        )

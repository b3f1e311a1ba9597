"""Grids on engines that are there already: each cell that is missing is a task of Ray, or a job of a Slurm array (through submitit).

What such a task does is what a process of `gossamer.app.grids.pool` does: it claims the cell, runs it and stores it. So the cells are the
same, under the same names, in the same folder, which all machines must share; an engine decides only where and when.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gossamer.app.config import value_of
from gossamer.app.grids.pool import Attempt, Ended, Outcome, interrupt, run
from gossamer.core.errors import BadInput, RunFailed
from gossamer.real.signals import handling

_TRIES = 5
"""Times that a cell whose task was sent away by the engine is handed in."""
_BUSY_S = 1.0
"""Before a cell that another program runs is asked for again."""
_CARRIED = ("GOSSAMER_", "HF_", "OMP_NUM_THREADS", "PYTHONPATH")
"""Of the environment, what a task of Ray is given."""


class Engine(Protocol):
    """Runs attempts somewhere."""

    name: ClassVar[str]
    at_once: int | None
    """Tasks to have handed in at a time; None: all, the engine sees to the rest."""

    def submit(self, attempts: Sequence[Attempt]) -> list[Any]:
        """Hands them in. A handle for each."""

    def ended(self, handles: Sequence[Any]) -> list[Any]:
        """Those that have ended, after a moment."""

    def outcome(self, handle: Any) -> Outcome:
        """Of one that has."""

    def stop(self, handles: Sequence[Any]) -> None:
        """Asks them to stop at their next round, and waits a little for that."""

    def close(self) -> None:
        """No more will be handed in."""


def outcomes_on(engine: Engine, attempts: Sequence[Attempt]) -> Ended:
    """As `gossamer.app.grids.pool.outcomes`. What the engine sends away (pre-empted, out of time) is handed in again, and goes on from its
    last checkpoint, if it has one.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the tasks are stopped.
        RunFailed: the engine is gone.
    """
    waiting, running = deque(_elsewhere(a) for a in attempts), dict[Any, Attempt]()
    own = {a.mark: a for a in attempts}
    tries = dict.fromkeys(own, 0)
    try:
        with handling(interrupt):
            while waiting or running:
                room = len(waiting) if engine.at_once is None else min(len(waiting), engine.at_once - len(running))
                some = [waiting.popleft() for _ in range(room)]
                if some:
                    running.update(zip(engine.submit(some), some, strict=True))
                for handle in engine.ended(list(running)):
                    attempt, outcome = running.pop(handle), engine.outcome(handle)
                    tries[attempt.mark] += outcome.kind == "stopped"
                    if outcome.kind == "busy":
                        time.sleep(_BUSY_S)
                    if outcome.kind == "busy" or (outcome.kind == "stopped" and tries[attempt.mark] < _TRIES):
                        waiting.append(attempt)
                    elif outcome.kind == "stopped":
                        yield own[attempt.mark], Outcome("error", f"{engine.name} stopped it {_TRIES} times before its end")
                    else:
                        yield own[attempt.mark], outcome
    except BaseException:
        engine.stop(list(running))
        raise
    finally:
        engine.close()


def _elsewhere(attempt: Attempt) -> Attempt:
    """The attempt as another process finds it, whatever its current folder."""
    return replace(attempt, cells=attempt.cells.resolve(), work=attempt.work.resolve())


class Task:
    """A cell, as an engine takes it: a function without arguments that can be pickled, and that submitit knows how to put back in its queue
    when the time of its job is over."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.folder = attempt, os.getcwd()

    def __call__(self) -> Outcome:
        """Runs it, with paths meant as where the grid was started."""
        os.chdir(self.folder)
        return run(self.attempt)

    def checkpoint(self) -> Any:
        """What submitit hands in anew."""
        return importlib.import_module("submitit.helpers").DelayedSubmission(self)


class OnRay:
    """Tasks of Ray: a cluster that runs, or one that is begun on this machine.

    Options: `address` ("auto", or host:port; left out: $RAY_ADDRESS, else this machine), and what each run is given: `num_cpus` (1),
    `num_gpus` (0), `memory_gb` (not counted).
    """

    name: ClassVar[str] = "ray"
    _KNOWN: ClassVar[tuple[str, ...]] = ("address", "num_cpus", "num_gpus", "memory_gb")

    def __init__(self, options: Mapping[str, Any], at_once: int | None, folder: Path) -> None:
        for key, value in options.items():
            if key not in self._KNOWN:
                raise BadInput(f"--engine-option {key}: ray knows {', '.join(self._KNOWN)}")
            number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            if not (isinstance(value, str) if key == "address" else number):
                raise BadInput(f"--engine-option {key}={value}: expected {'a text' if key == 'address' else 'a number, 0 or more'}")
        self._ray = _library("ray")
        self.at_once = at_once
        self._ours = not self._ray.is_initialized()
        if self._ours:
            try:
                self._ray.init(
                    address=options.get("address"),
                    include_dashboard=None if "address" in options or "RAY_ADDRESS" in os.environ else False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    runtime_env={"env_vars": {k: v for k, v in os.environ.items() if k.startswith(_CARRIED)}},
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise BadInput(f"there is no Ray to run on ({_first(error)}): start one, or leave the option address out") from error
        given = {key: options[key] for key in ("num_cpus", "num_gpus") if key in options}
        if "memory_gb" in options:
            given["memory"] = int(1e9 * options["memory_gb"])
        self._do = self._ray.remote(_call).options(**given)

    def submit(self, attempts: Sequence[Attempt]) -> list[Any]:
        return [self._do.remote(Task(attempt)) for attempt in attempts]

    def ended(self, handles: Sequence[Any]) -> list[Any]:
        done, _ = self._ray.wait(list(handles), timeout=1.0)
        return list(done)

    def outcome(self, handle: Any) -> Outcome:
        try:
            found: Outcome = self._ray.get(handle)
        except self._ray.exceptions.TaskCancelledError:
            return Outcome("stopped")
        except self._ray.exceptions.RayError as error:
            return Outcome("error", f"Ray lost it: {_first(error)}")
        return found

    def stop(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._ray.cancel(handle, force=False)
        if handles:
            self._ray.wait(list(handles), num_returns=len(handles), timeout=60.0)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()


def _call(task: Task) -> Outcome:
    return task()


class OnSlurm:
    """Arrays of Slurm jobs, through submitit; their logs are in `folder`.

    Options: `cluster` ("slurm"; "local" and "debug" are submitit's, to try it without Slurm), those that submitit knows for all clusters
    (timeout_min, mem_gb, cpus_per_task, gpus_per_node, name), and those of Slurm: partition, account, qos, constraint, ...
    """

    name: ClassVar[str] = "slurm"
    at_once: int | None = None
    _ARRAY: ClassVar[int] = 1000
    """Jobs of an array; Slurm's usual limit is 1001."""
    _POLL_S: ClassVar[float] = 1.0

    def __init__(self, options: Mapping[str, Any], at_once: int | None, folder: Path) -> None:
        self._submitit = _library("submitit")
        given = dict(options)
        cluster = given.pop("cluster", "slurm")
        if cluster not in ("slurm", "local", "debug"):
            raise BadInput(f"--engine-option cluster={cluster}: expected slurm, or local or debug to try it without")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise BadInput("--engine slurm: there is no sbatch here: start it on a login node of the cluster")
        everywhere = self._submitit.AutoExecutor._typed_parameters()
        parameters = {key if key in everywhere or key.startswith("slurm_") else f"slurm_{key}": value for key, value in given.items()}
        parameters = {"name": "gossamer", "timeout_min": 24 * 60, "cpus_per_task": 1} | parameters
        if at_once is not None:
            parameters["slurm_array_parallelism"] = at_once
        try:
            self._executor = self._submitit.AutoExecutor(folder=folder.resolve(), cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (NameError, ValueError, AssertionError, TypeError) as error:
            raise BadInput(f"--engine-option: {_first(error)}") from error

    def submit(self, attempts: Sequence[Attempt]) -> list[Any]:
        found: list[Any] = []
        for k in range(0, len(attempts), self._ARRAY):
            try:
                found += self._executor.submit_array([Task(attempt) for attempt in attempts[k : k + self._ARRAY]])
            except self._submitit.core.utils.FailedJobError as error:
                raise RunFailed(f"Slurm refused the array: {_first(error)}") from error
        return found

    def ended(self, handles: Sequence[Any]) -> list[Any]:
        if found := [job for job in handles if job.done()]:
            return found
        time.sleep(self._POLL_S)
        return []

    def outcome(self, handle: Any) -> Outcome:
        try:
            found: Outcome = handle.result()
        except self._submitit.core.utils.UncompletedJobError as error:
            return Outcome("error", f"{_first(error)}; see {handle.paths.stderr}")
        return found

    def stop(self, handles: Sequence[Any]) -> None:
        for job in handles:
            job.cancel(check=False)

    def close(self) -> None:
        pass


_ENGINES: dict[str, Callable[[Mapping[str, Any], int | None, Path], Engine]] = {"ray": OnRay, "slurm": OnSlurm}


def engine_named(name: str, options: Sequence[str], at_once: int | None, folder: Path) -> Engine:
    """The engine of that name.

    Args:
        options: texts `key=value`.
        at_once: runs at a time; None: as many as the engine has room for.
        folder: for the logs of its jobs.

    Raises:
        BadInput: an unknown engine or option, a library that is not installed, no such cluster.
    """
    if name not in _ENGINES:
        raise BadInput(f"--engine {name}: expected {' or '.join(_ENGINES)}; left out, runs are processes of this machine")
    return _ENGINES[name](dict(map(_option, options)), at_once, folder)


def _option(text: str) -> tuple[str, Any]:
    """`key=value`, as of --set."""
    key, sign, raw = (part.strip() for part in text.partition("="))
    if not sign or not key or not raw:
        raise BadInput(f"--engine-option {text}: expected key=value, such as --engine-option partition=gpu")
    return key, value_of(raw)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"--engine needs {name}, which is not installed: pip install 'gossamer[grid]'") from error


def _first(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""The ways a run can end before its end, told apart by exit code."""

from __future__ import annotations


class BadInput(ValueError):
    """What the user gave cannot work. The message names the value, what was expected and the remedy (exit code 2)."""


class Stopped(Exception):
    """A run that was asked to stop, and did so cleanly: it can be resumed. The message says how (exit code 130)."""


class RunFailed(RuntimeError):
    """A run that started and could not go on: a dead worker, a deadlock, replicas that diverged (exit code 1)."""

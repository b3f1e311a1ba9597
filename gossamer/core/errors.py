"""The ways a run can end before its end, told apart by exit code."""

from __future__ import annotations


class BadInput(ValueError):
    """What the user gave cannot work. The message names the value, what was expected and the remedy (exit code 2)."""


class Stopped(Exception):
    """A run that was asked to stop, and did so cleanly: it can be resumed. The message says how (exit code 130)."""


class RunFailed(RuntimeError):
    """A run that started and could not go on: a dead worker, a deadlock, replicas that diverged (exit code 1)."""


def said(error: BaseException, *, kind: bool = False, most: int = 400) -> str:
    """What a library's error says, on one line, cut after `most` letters.

    >>> said(ValueError("no such   file")), said(KeyError()), said(ValueError("no"), kind=True), said(ValueError("a long story"), most=8)
    ('no such file', 'KeyError', 'ValueError: no', 'a lon...')

    Args:
        kind: with the name of its type.
    """
    name, text = type(error).__name__, " ".join(str(error).split())
    line = f"{name}: {text}" if kind else text or name
    return line if len(line) <= most else f"{line[: most - 3]}..."

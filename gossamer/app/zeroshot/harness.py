"""Items through lm-eval (EleutherAI's lm-evaluation-harness): its tasks, configured in Python, and its class for models of transformers."""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gossamer.app.zeroshot.items import Item, digest
from gossamer.app.zeroshot.tasks import Task
from gossamer.core.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

BATCH = 16
"""Texts at a time."""
_TEST = "test"
_NO_LIMIT = int(1e30)
"""What transformers has where a tokenizer knows of no longest text."""


@dataclass(frozen=True)
class Score:
    """How a model did on the items of a task."""

    task: str
    accuracy: float
    standard_error: float
    """Of the accuracy, over the items."""
    chance: float
    """The accuracy of guessing."""
    metric: str
    """Which of `accuracies` it is."""
    accuracies: Mapping[str, float]
    items_sha256: str
    correct: str
    """A digit an item: 1 where it was right."""

    @property
    def items(self) -> int:
        return len(self.correct)

    @property
    def verdict(self) -> str:
        """Where the accuracy is, within two standard errors, as against chance."""
        return against_chance(self.accuracy, self.standard_error, self.chance)


def against_chance(accuracy: float, error: float, chance: float) -> str:
    """ "above chance", "at chance" or "below chance": by more than two standard errors, or not.

    >>> against_chance(0.60, 0.02, 0.5), against_chance(0.53, 0.02, 0.5), against_chance(0.45, 0.02, 0.5)
    ('above chance', 'at chance', 'below chance')
    """
    if abs(accuracy - chance) <= 2 * error:
        return "at chance"
    return "above chance" if accuracy > chance else "below chance"


def check_installed() -> None:
    """Raises:
    BadInput: lm-eval is not installed.
    """
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("lm_eval", "datasets")):
        raise BadInput("evaluation goes through lm-eval, which is not installed: pip install 'gossamer[eval]'")


def score(
    model: nn.Module,
    tokenizer: Any,
    asked: Sequence[tuple[Task, Sequence[Item]]],
    *,
    longest: int,
    batch: int = BATCH,
    now: Callable[[str], None] = lambda text: None,
) -> list[Score]:
    """The accuracies of `model`, a causal language model of transformers, without examples in the prompt.

    Args:
        tokenizer: of transformers.
        asked: tasks and their items, at least two of each.
        longest: tokens that the model sees at once; a longer context loses its beginning. Where a choice alone is longer, so much.
        batch: texts at a time; bounds memory.
        now: told what goes on.

    Raises:
        BadInput: lm-eval is not installed, a task has one item, or a choice is longer than the model can take.
    """
    check_installed()
    tokenizer = _unbounded(tokenizer)
    for task, items in asked:
        if len(items) < 2:
            raise BadInput(f"{task.name} has {len(items)} item, of which nothing can be told: give at least 2")
    needed = max(_longest_choice(tokenizer, task, items) for task, items in asked)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and needed > positions:
        raise BadInput(
            f"a choice has {needed} tokens, and the model takes {positions}: leave its task out, or evaluate a model that takes more"
        )
    with _quiet(), _counted(model, sum(item.ways for _, items in asked for item in items), now):
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=max(longest, needed))
        tasks = {task.name: as_lm_eval(task, items) for task, items in asked}
        found: Any = evaluate(judged, tasks, bootstrap_iters=1, log_samples=True)
    return [_score(task, items, found) for task, items in asked]


@contextmanager
def _counted(model: nn.Module, texts: int, now: Callable[[str], None]) -> Iterator[None]:
    """Tells how many texts the model has been asked. lm-eval may take several for one, so that it ends before all."""
    rows = 0

    def count(module: nn.Module, given: object, found: Any) -> None:
        nonlocal rows
        rows += len(found.logits)
        now(f"the model is asked: {min(rows, texts):,} of {texts:,} texts")

    now(f"the model is asked: {texts:,} texts")
    hook = model.register_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _unbounded(tokenizer: Any) -> Any:
    """A copy that does not remark on texts longer than the model takes: what is too long is cut here, or refused."""
    found = copy.deepcopy(tokenizer)
    found.model_max_length = _NO_LIMIT
    return found


def _longest_choice(tokenizer: Any, task: Task, items: Sequence[Item]) -> int:
    texts = list(dict.fromkeys(task.delimiter + choice for item in items for choice in item.choices))
    return max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def as_lm_eval(task: Task, items: Sequence[Item]) -> Any:
    """The task as lm-eval has them."""
    with _quiet():
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask

        rows = [{"contexts": list(i.contexts), "choices": list(i.choices), "gold": i.gold} for i in items]
        config = _config(task, items[0]) | {
            "task": task.name,
            "custom_dataset": lambda **_: {_TEST: Dataset.from_list(rows)},
            "test_split": _TEST,
            "num_fewshot": 0,
            "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics_of(items[0])],
            "metadata": {"version": 1.0},
        }
        return ConfigurableTask(config=config)


def metrics_of(item: Item) -> tuple[str, ...]:
    """What is measured on such items."""
    return ("acc", "acc_norm") if item.kind == "choices" else ("acc",)


def _config(task: Task, first: Item) -> dict[str, Any]:
    """What sets the three kinds of items apart; all items of a task are of one."""
    if first.kind == "open":
        return {
            "output_type": "loglikelihood",
            "doc_to_text": lambda doc: doc["contexts"][0],
            "doc_to_target": lambda doc: task.delimiter + doc["choices"][0],
        }
    shared = {"output_type": "multiple_choice", "target_delimiter": task.delimiter}
    if first.kind == "contexts":  # a number for the text tells lm-eval so
        return shared | {
            "doc_to_text": lambda doc: doc["gold"],
            "doc_to_choice": lambda doc: doc["contexts"],
            "doc_to_target": lambda doc: doc["choices"][0],
        }
    return shared | {
        "doc_to_text": lambda doc: doc["contexts"][0],
        "doc_to_choice": lambda doc: doc["choices"],
        "doc_to_target": lambda doc: doc["gold"],
    }


def _score(task: Task, items: Sequence[Item], found: Any) -> Score:
    result = found["results"][task.name]
    metric = task.metric if task.metric in metrics_of(items[0]) else "acc"
    samples = sorted(found["samples"][task.name], key=lambda s: s["doc_id"])
    return Score(
        task.name,
        float(result[f"{metric},none"]),
        float(result[f"{metric}_stderr,none"]),
        sum(item.chance for item in items) / len(items),
        metric,
        {m: float(result[f"{m},none"]) for m in metrics_of(items[0])},
        digest(items),
        "".join("1" if s[metric] else "0" for s in samples),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's progress bars are for a terminal, and its remarks for its own developers."""
    logger, silent = logging.getLogger("lm_eval"), not sys.stderr.isatty()
    level = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        if silent:
            stack.enter_context(redirect_stderr(io.StringIO()))
        try:
            yield
        finally:
            logger.setLevel(level)

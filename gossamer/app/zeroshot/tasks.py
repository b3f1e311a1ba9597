"""The public tasks: how a record becomes an item, and where its records are found.

Prompts are those of lm-eval's own tasks of the same name, so that accuracies compare. A record has the fields of the data set on the
Hugging Face hub, or the plain ones, `query`, `choices` and `gold` (the number of the right choice, from 0), as many local copies have them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gossamer.app.zeroshot.items import Item

Metric: TypeAlias = Literal["acc", "acc_norm"]
Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """Where a task's items come from, when they are not made of text."""

    item: Callable[[Record], Item]
    """Of a record.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the record is not as expected.
    """
    hub: str
    """The data set's name on the Hugging Face hub."""
    configuration: str | None
    split: str


@dataclass(frozen=True)
class Task:
    """A set of questions."""

    name: str
    title: str
    metric: Metric
    """The accuracy that is usually told: of the choice likeliest as it stands, or by its log-likelihood per character."""
    records: Records | None
    """None: made of held-out text (`gossamer.app.zeroshot.embedded`)."""
    delimiter: str = " "
    """Between context and choice."""


def _plain(r: Record) -> tuple[str, tuple[str, ...], int]:
    return str(r["query"]), tuple(r["choices"]), _index(r["gold"])


def _index(value: Any) -> int:
    """A number from 0, which may be written as text."""
    if isinstance(value, bool):
        raise TypeError(f"the right answer is {value}")
    return int(value)


def _lettered(r: Record) -> tuple[tuple[str, ...], int]:
    """Choices with labels, such as A to D or 1 to 4, and the number of the right one."""
    labels = [str(label) for label in r["choices"]["label"]]
    return tuple(r["choices"]["text"]), labels.index(str(r["answerKey"]).strip())


def _question(text: str) -> str:
    return f"Question: {text.strip().removeprefix('Question:').strip()}\nAnswer:"


def _arc(r: Record) -> Item:
    if "query" in r:
        query, choices, gold = _plain(r)
        return Item((_question(query),), choices, gold)
    choices, gold = _lettered(r)
    return Item((f"Question: {r['question']}\nAnswer:",), choices, gold)


def _openbook(r: Record) -> Item:
    if "query" in r:
        query, choices, gold = _plain(r)
        return Item((query,), choices, gold)
    choices, gold = _lettered(r)
    return Item((str(r["question_stem"]),), choices, gold)


def _piqa(r: Record) -> Item:
    if "query" in r:
        query, choices, gold = _plain(r)
        return Item((_question(query),), choices, gold)
    return Item((f"Question: {r['goal']}\nAnswer:",), (r["sol1"], r["sol2"]), _index(r["label"]))


def _hellaswag(r: Record) -> Item:
    if "query" in r:
        query, choices, gold = _plain(r)
        return Item((query,), choices, gold)
    context = f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}"
    return Item((_wikihow(context),), tuple(map(_wikihow, r["endings"])), _index(r["label"]))


def _wikihow(text: str) -> str:
    """Without the marks that WikiHow's part of HellaSwag has, as lm-eval takes them out."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _winogrande(r: Record) -> Item:
    if "context_options" in r:
        return Item(tuple(r["context_options"]), (str(r["continuation"]).strip(),), _index(r["gold"]))
    before, blank, after = r["sentence"].partition("_")
    if not blank:
        raise ValueError('the sentence has no "_"')
    return Item((before + r["option1"], before + r["option2"]), (after.strip(),), ["1", "2"].index(str(r["answer"])))


def _mmlu(r: Record) -> Item:
    letters = ("A", "B", "C", "D")
    if "query" in r and tuple(r["choices"]) == letters:  # the query names the answers
        return Item((str(r["query"]).rstrip(),), letters, _index(r["gold"]))
    question, gold = (r["query"], r["gold"]) if "query" in r else (r["question"], r["answer"])
    answers = "".join(f"\n{letter}. {answer}" for letter, answer in zip(letters, r["choices"], strict=True))
    subject = str(r.get("subject", "")).replace("_", " ")
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n" if subject else ""
    return Item((f"{about}{question.strip()}{answers}\nAnswer:",), letters, _index(gold))


def _lambada(r: Record) -> Item:
    if "context" in r:
        return Item((str(r["context"]).rstrip(),), (str(r["continuation"]).strip(),), 0)
    context, _, last = r["text"].rpartition(" ")
    return Item((context,), (last,), 0)


EMBEDDED: Mapping[str, Task] = {
    "word_order": Task("word_order", "word order", "acc", None, delimiter=""),
    "cloze": Task("cloze", "cloze", "acc_norm", None, delimiter=""),
}
PUBLIC: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("arc_easy", "ARC-easy", "acc", Records(_arc, "allenai/ai2_arc", "ARC-Easy", "test")),
        Task("arc_challenge", "ARC-challenge", "acc_norm", Records(_arc, "allenai/ai2_arc", "ARC-Challenge", "test")),
        Task("hellaswag", "HellaSwag", "acc_norm", Records(_hellaswag, "Rowan/hellaswag", None, "validation")),
        Task("mmlu", "MMLU", "acc", Records(_mmlu, "cais/mmlu", "all", "test")),
        Task("piqa", "PIQA", "acc_norm", Records(_piqa, "baber/piqa", None, "validation")),
        Task("winogrande", "WinoGrande", "acc", Records(_winogrande, "allenai/winogrande", "winogrande_xl", "validation")),
        Task("openbookqa", "OpenBookQA", "acc_norm", Records(_openbook, "allenai/openbookqa", "main", "test")),
        Task("lambada_openai", "LAMBADA", "acc", Records(_lambada, "EleutherAI/lambada_openai", "default", "test")),
    )
}
TASKS: Mapping[str, Task] = {**EMBEDDED, **PUBLIC}

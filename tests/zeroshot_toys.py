"""Text that a model of thirty thousand parameters learns in a hundred steps, and records of every public task."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from small_runs import WORDS, settings

_ALL = list(dict.fromkeys(WORDS))
NEXT = {word: (_ALL[(k + 1) % len(_ALL)], _ALL[(k + 5) % len(_ALL)]) for k, word in enumerate(_ALL)}
"""Each word has two that may follow it, so the order of words can be told from pairs alone."""


def chains(folder: Path) -> Path:
    """Files of words in which each is one of the two that may follow the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for k in range(24):
        words = [draw.choice(_ALL)]
        while len(words) < 1300:
            words.append(draw.choice(NEXT[words[-1]]))
        (folder / f"part-{k}.txt").write_text(" ".join(words) + "\n")
    return folder


def short_training(text: Path, **more: object) -> list[str]:
    """`--set` for 120 steps of two workers: seconds."""
    values = {
        "fleet__name": '"uniform-2"', "method__name": '"diloco"', "inner__name": '"adamw"', "inner__lr": 1e-2, "plan__steps": 40,
        "plan__batch": 8, "plan__sequence": 48, "data__tokenizer": '"bpe"', "data__vocab_size": 330, "run__rounds": 3, "eval__every": 0,
    }  # fmt: skip
    return settings(text, **{**values, **more})


RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arc_easy": (
        {"question": "Which is wet?", "choices": {"text": ["stone", "water", "sand"], "label": ["1", "2", "3"]}, "answerKey": "2"},
        {"query": "Question: Which is wet?", "choices": ["stone", "water", "sand"], "gold": 1},
    ),
    "arc_challenge": (
        {"question": "Which falls?", "choices": {"text": ["rain", "smoke"], "label": ["A", "B"]}, "answerKey": "A"},
        {"query": "Question: Which falls?", "choices": ["rain", "smoke"], "gold": 0},
    ),
    "hellaswag": (
        {
            "activity_label": "Baking", "ctx_a": "She takes [step] flour.", "ctx_b": "then she",
            "endings": ["mixes it. [title] Bake", "runs", "sits", "flies"], "label": "0",
        },
        {"query": "Baking: She takes flour. Then she", "choices": ["mixes it.. Bake", "runs", "sits", "flies"], "gold": 0},
    ),
    "mmlu": (
        {"question": "What is 2 + 2? ", "subject": "abstract_algebra", "choices": ["1", "2", "3", "4"], "answer": 3},
        {"query": "What is 2 + 2?", "subject": "abstract_algebra", "choices": ["1", "2", "3", "4"], "gold": 3},
    ),
    "piqa": (
        {"goal": "To boil an egg,", "sol1": "heat water.", "sol2": "heat sand.", "label": 0},
        {"query": "Question: To boil an egg,\n", "choices": ["heat water.", "heat sand."], "gold": 0},
    ),
    "winogrande": (
        {"sentence": "The cup did not fit the box, so the _ was too big.", "option1": "cup", "option2": "box", "answer": "1"},
        {
            "context_options": ["The cup did not fit the box, so the cup", "The cup did not fit the box, so the box"],
            "continuation": "was too big.", "gold": 0,
        },
    ),
    "openbookqa": (
        {"question_stem": "Plants need", "choices": {"text": ["light", "coins"], "label": ["A", "B"]}, "answerKey": "A"},
        {"query": "Plants need", "choices": ["light", "coins"], "gold": 0},
    ),
    "lambada_openai": (
        {"text": "He took the key and opened the door"},
        {"context": "He took the key and opened the", "continuation": "door"},
    ),
}  # fmt: skip
"""One question a task, made up here: with the fields of the hub, and with the plain ones."""


def write_items(folder: Path, names: list[str], plain: bool = True, copies: int = 4) -> Path:
    """`<task>.jsonl` for each name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(RECORDS[name][plain])}\n" * copies)
    return folder

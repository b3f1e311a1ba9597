"""The model card of an exported run: what was done, in numbers that the run folder has. It claims nothing that was not measured."""

from __future__ import annotations

from typing import Any

import transformers

import gossamer
from gossamer.app.folder import RunFolder
from gossamer.app.trained import Trained
from gossamer.train.evaluate import perplexity


def card_of(found: Trained, run: RunFolder) -> str:
    """The text of `README.md`."""
    facts, config = run.facts(), found.config
    title, model = config.name or config.method.name, found.model.config
    base, revision = config.model.checkpoint, config.model.revision
    rows = {
        "architecture": f"{model.model_type}, {sum(p.numel() for p in found.model.parameters()):,} parameters",
        **({"continued from": f"{base}{f', revision {revision}' if revision else ''}"} if base else {}),
        "trained parameters": f"{facts['parameters']:,}",
        "method": f"{config.method.name}, {len(facts['steps'])} workers, fleet {config.fleet.name}",
        "parameters are": _whose(found),
        "rounds": f"{found.round:,}",
        "tokens": f"{found.tokens:,} (of all workers together)",
        "sequence length": f"{config.plan.sequence:,} tokens",
        "data": _data(facts),
        "tokenizer": f"{config.data.tokenizer}, {facts['vocab_size']:,} symbols",
        "held-out perplexity": _measured(found, run),
        "seed": str(config.seed),
        "versions": f"gossamer {gossamer.__version__}, torch {facts['torch']}, transformers {transformers.__version__}; "
        f"the run began with gossamer {facts['gossamer']}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gossamer
---

# {title}

A causal language model, trained by Gossamer on workers that exchange rarely.

| | |
|---|---|
{table}

It was trained to predict the next token of this data, and evaluated as said above, on nothing else. Documents were joined with the end mark
between them, so a prompt is best begun with it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""


def _data(facts: dict[str, Any]) -> str:
    """What it was trained on. Of documents that are packed as they come nobody has counted the tokens."""
    tokens, mark = facts["train_tokens"], facts["corpus_sha256"][:16]
    if tokens is None:
        return f"{facts['corpus']} (documents, packed as they come; SHA-256 of what they are {mark}...)"
    return f"{facts['corpus']} ({tokens:,} tokens; SHA-256 of the token ids {mark}...)"


def _whose(found: Trained) -> str:
    many = len(found.workers)
    return f"the mean over {many} workers, which differ" if many > 1 else "what all workers hold, or the global server"


def _measured(found: Trained, run: RunFolder) -> str:
    """The perplexity of these parameters on the held-out text, where the run has measured it."""
    e = found.config.eval
    on = f"on {e.sequences} windows of {found.config.plan.sequence} tokens of the held-out part of the data"
    value: Any = None
    if run.finished and (end := run.summary())["rounds"] == found.round:
        value = end["final_perplexity"]
    else:
        same = "fleet" if len(found.workers) > 1 else None
        for r in run.read_lines("metrics.jsonl"):
            if r["kind"] == "eval" and r["round"] == found.round and same in (None, r["worker"]) and r["loss"] is not None:
                value = perplexity(r["loss"])
    if value is None:
        return "not measured"
    rounded = " (of the float32 parameters, before they were rounded to bfloat16)" if found.config.model.dtype == "bf16" else ""
    return f"{value:.4g} {on}{rounded}"

"""Gossamer in transformers' Trainer:

workers = gossamer.connect(alone=True)        # before TrainingArguments: each process trains by itself
join = partial(gossamer.join, method="diloco", steps=30, batch=8, sequence=512, rounds=200, workers=workers)
trainer = Trainer(model, args, train_dataset=mine(workers.me, workers.n), callbacks=[GossamerCallback(join)])
trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from gossamer.core.errors import BadInput
from gossamer.integrations.state import outer_state, say_if_over
from gossamer.library import Outer, PlannedLR, Record
from gossamer.library.saved import write

FILE = "gossamer.pt"
"""In a checkpoint of the Trainer: this worker's outer state."""


class GossamerCallback(TrainerCallback):  # type: ignore[misc]
    """Joins when training begins, exchanges as it goes, and closes at its end.

    - The learning rate follows the planned tokens of all workers by the method's schedule, whatever `lr_scheduler_type` says; the peak is
      `learning_rate`. With `schedule=False` the Trainer's own scheduler is left alone.
    - A checkpoint that is due in the middle of a round is put off to its end, and this worker's outer state is written into it
      (`gossamer.pt`). `trainer.train(resume_from_checkpoint=...)` finds it there. Give each worker an `output_dir` of its own.
    - Tokens are those planned, or those seen where the Trainer counts them (`include_num_input_tokens_seen`).
    - Training ends when the run is over, or earlier with `max_steps` or the data: that is a leave, and the others go on.

    Args:
        join: makes an Outer of a model and an optimizer: `functools.partial(gossamer.join, method=..., ...)`.
        schedule: whether to set the learning rate.
        partial: as of `Outer.close`.
        on_record: told of each step's record.
    """

    def __init__(
        self,
        join: Callable[[nn.Module, Optimizer], Outer],
        *,
        schedule: bool = True,
        partial: Literal["send", "drop"] = "send",
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._join, self._schedule, self._partial, self._on_record = join, schedule, partial, on_record
        self.outer: Outer
        self._lr: PlannedLR | None = None
        self._tokens, self._due = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Joins; goes on from a checkpoint where the Trainer does."""
        optimizer = kwargs["optimizer"]
        self.outer = self._join(kwargs["model"], getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it
        if state.global_step:
            self.outer.load_state_dict(_kept(_checkpoint(args, state)))
            say_if_over(self.outer)
        if self._schedule:
            self._lr = self.outer.scheduler()
        self._tokens = state.num_input_tokens_seen
        self._show(kwargs["lr_scheduler"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A step of the optimizer, or one that AMP has skipped."""
        counted, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        record = self.outer.step(tokens=counted or None)
        self._show(kwargs["lr_scheduler"])
        last = record.over or control.should_training_stop or state.global_step >= state.max_steps
        self._due = self._due or control.should_save
        control.should_save = self._due and (last or record.completed)
        self._due = self._due and not control.should_save
        if record.over:
            control.should_training_stop = True
        self._on_record(record)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the outer state."""
        if (found := outer_state(self.outer)) is not None:
            write(found, _checkpoint(args, state) / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes."""
        self.outer.close(partial=self._partial)

    def _show(self, lr_scheduler: Any) -> None:
        """What the Trainer logs as the learning rate is the one that is used."""
        if self._lr is not None and lr_scheduler is not None:
            getattr(lr_scheduler, "scheduler", lr_scheduler)._last_lr = self._lr.get_last_lr()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    if not path.is_file():
        raise BadInput(f"the Trainer goes on from step {folder.name}, and {path} is not there: it was saved without gossamer, or elsewhere")
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found

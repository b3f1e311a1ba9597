"""Gossamer in Lightning:

workers = gossamer.connect(alone=True)        # before the Trainer: each process trains by itself
join = partial(gossamer.join, method="diloco", steps=30, batch=8, sequence=512, rounds=200, workers=workers)
Trainer(devices=1, callbacks=[GossamerCallback(join)], max_epochs=-1).fit(module, mine(workers.me, workers.n))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import BadInput
from gossamer.integrations.state import outer_state, say_if_over
from gossamer.library import Outer, Record

try:
    from lightning.pytorch import Callback
except ImportError:  # said where it is needed: this module can be looked at without
    Callback = object


class GossamerCallback(Callback):  # type: ignore[misc]
    """Joins when training starts, exchanges as it goes, and closes at its end.

    - The learning rate follows the planned tokens of all workers by the method's schedule; the peak is the optimizer's own. With
      `schedule=False` it is left alone. Give `configure_optimizers` no scheduler of its own then.
    - The outer state is part of Lightning's checkpoints (`ModelCheckpoint`, `save_checkpoint`). For methods with overlap or fragments save
      at the end of a round (`every_n_train_steps` a multiple of its steps): elsewhere it is left out, with a warning.
    - Gradient accumulation is counted by the optimizer's steps. Without `tokens` the loss of a step is that of its last batch.
    - Training ends when the run is over, or earlier with `max_steps` or the data: that is a leave, and the others go on.

    Args:
        join: makes an Outer of a model and an optimizer: `functools.partial(gossamer.join, method=..., ...)`.
        tokens: of a batch; None: those planned.
        schedule: whether to set the learning rate.
        partial: as of `Outer.close`.
        on_record: told of each step's record.
    """

    def __init__(
        self,
        join: Callable[[nn.Module, Optimizer], Outer],
        *,
        tokens: Callable[[Any], int] | None = None,
        schedule: bool = True,
        partial: Literal["send", "drop"] = "send",
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        if Callback is object:
            raise BadInput("gossamer.integrations.lightning needs Lightning: pip install 'gossamer[lightning]'")
        self._join, self._tokens_of, self._schedule, self._partial, self._on_record = join, tokens, schedule, partial, on_record
        self.outer: Outer | None = None
        self._kept: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Joins; goes on from a checkpoint where Lightning does."""
        if len(trainer.optimizers) != 1:
            raise BadInput(f"the module has {len(trainer.optimizers)} optimizers: gossamer's callback takes one")
        kept, self._kept = self._kept, None
        if kept is None and trainer.ckpt_path is not None:
            raise BadInput(
                f"Lightning goes on from {trainer.ckpt_path}, which has no outer state: it was saved without this callback, or "
                "in the middle of a round"
            )
        self.outer = self._join(pl_module, trainer.optimizers[0])
        if kept is not None:
            self.outer.load_state_dict(kept)
            say_if_over(self.outer)
        if self._schedule:
            self.outer.scheduler()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch; with gradient accumulation not always a step."""
        assert self.outer is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        record = self.outer.step(tokens=None if self._tokens_of is None else self._tokens_of(batch), loss=loss)
        if record.over:
            trainer.should_stop = True
        self._on_record(record)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes."""
        assert self.outer is not None
        self.outer.close(partial=self._partial)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the others."""
        if self.outer is not None:
            self.outer.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """The outer state, for Lightning's checkpoints."""
        found = None if self.outer is None else outer_state(self.outer)
        return {} if found is None else {"outer": found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To be taken up when training starts."""
        self._kept = state_dict.get("outer")

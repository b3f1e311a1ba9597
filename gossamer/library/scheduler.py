"""A learning rate that follows the planned tokens of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gossamer.core.schedule import Schedule
from gossamer.library.records import Work


class PlannedLR(LRScheduler):
    """lr = initial_lr * factor(planned tokens before the next step, planned tokens of the run), in every group.

    The optimizer's learning rate at the time of making is the peak. It is a pure function of where the run stands, so it has no state of
    its own, and a resumed run has it right. `Outer.step` brings it up to date; to call `step`, as a trainer does, changes nothing.

    Args:
        where: tells where the run stands.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, where: Callable[[], Work]) -> None:
        self.schedule, self._where = schedule, where
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Sets the learning rates for the next optimizer step."""
        self._step_count = getattr(self, "_step_count", 0) + 1
        work = self._where()
        factor = self.schedule.factor(work.tokens, work.total_tokens)
        for group in self.optimizer.param_groups:
            lr = group["initial_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch = work.round

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates for the next optimizer step."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it follows the run."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take back; sets the learning rates."""
        self.step()

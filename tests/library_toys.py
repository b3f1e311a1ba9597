"""A user's own loop on the toy body's data, in threads over gloo, and what it must be equal to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lockstep import Lockstep
from net_toys import in_threads
from toy import ToyBody, ToyModel

import gossamer
from gossamer.core.inner import AdamW
from gossamer.core.method import Method
from gossamer.core.plan import uniform
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree
from gossamer.library import Outer, Record
from gossamer.real import Group
from gossamer.recipes import Setting
from gossamer.train import model as models

ADAM = AdamW(lr=0.01, clip=None)
SMALL = Setting(uniform(2, 3, 2, ToyBody.LENGTH), rounds=4, seed=5, inner=ADAM, schedule=Constant())


class User:
    """Somebody's training loop: a model, an optimizer, data, and the lines that are Gossamer's."""

    def __init__(self, group: Group, method: Any, *, poison_at: int | None = None, **join: Any) -> None:
        self.body = ToyBody(group.me, getattr(method, "inner", None), poison_at=poison_at)
        self.records: list[Record] = []
        self.outer: Outer = gossamer.join(self.body.model, self.body.optimizer, method, workers=group, **join)

    def steps(self, count: int) -> User:
        """So many steps, or up to the end of the run."""
        for _ in range(count):
            batch = self.outer.work.batch
            loss = self.body.gradient(batch) / (batch * ToyBody.LENGTH)
            self.body.take()
            self.records.append(self.outer.step(tokens=batch * ToyBody.LENGTH, loss=loss))
            if self.outer.over:
                break
        return self

    def rounds(self, count: int) -> User:
        """So many complete rounds."""
        for _ in range(count):
            self.steps(self.outer.work.steps)
        return self

    @property
    def live(self) -> Tree:
        return {name: p.detach().clone() for name, p in self.body.params.items()}

    def kept(self) -> dict[str, Any]:
        """What a user saves."""
        return {"model": self.live, "body": copy.deepcopy(self.body.state()), "outer": self.outer.state_dict()}


def users(n: int, job: Callable[[Group], Any], **options: Any) -> list[Any]:
    """What `job` returns for each of n workers in threads; it closes its run itself."""
    return in_threads(n, job, close=False, **options)


def reference(method: Method, bodies: Sequence[Any] | None = None) -> Lockstep:
    """The project's own loop on the same."""
    return Lockstep(method, bodies=bodies, layout=models.layout(ToyModel()))


def live(run: Lockstep) -> list[Tree]:
    return [{name: p.detach() for name, p in body.params.items()} for body in run.bodies]


def same(a: Tree, b: Tree) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in b)

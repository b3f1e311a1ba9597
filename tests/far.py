"""An accelerator for tests on machines without one: tensors that say they are on another device, and are not mixed with the host's.

A `Far` tensor keeps its numbers in a host tensor and does its arithmetic there, so its bits are the CPU's. As on a real accelerator an
operation on tensors of both places fails (scalars excepted), NumPy cannot see it, and only `cpu()`, `to()` and `copy_` cross over.
It says nothing of what a real accelerator's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")
"""A device that this torch knows and has not got."""
CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Far(Tensor):
    """A tensor on `DEVICE`, with its numbers in `host`."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    far = [t for t in tensors if isinstance(t, Far)]
    if far and func not in CROSSING and any(t.ndim for t in tensors if not isinstance(t, Far)):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    asked = kwargs.get("device")
    there = bool(far) if asked is None else torch.device(asked) == DEVICE
    if func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], Far)
    args, kwargs = tree_map(lambda t: t.host if isinstance(t, Far) else t, (args, dict(kwargs)))
    out = func(*args, **(kwargs | {"device": torch.device("cpu")} if asked is not None else kwargs))
    known = {id(t.host): t for t in far}  # what an operation in place returns is what it was given
    return tree_map(lambda t: (known[id(t)] if id(t) in known else Far(t)) if there and isinstance(t, Tensor) else t, out)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """Within it, tensors can be made on and moved to `DEVICE`."""
    with _Mode():
        yield DEVICE

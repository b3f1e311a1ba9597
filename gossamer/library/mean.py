"""The mean of the workers' anchors, at every one of them."""

from __future__ import annotations

import torch

from gossamer.core.tree import Tree
from gossamer.real.group import Group


def mean_everywhere(group: Group, tree: Tree) -> Tree:
    """The plain mean of the trees of all that are there, the same bits at all; on the device of `tree`. All workers call it, in the same
    order of calls. Bytes: a tree to the lowest worker and back, for each; they are in no record.

    Raises:
        RunFailed: a worker is gone.
    """
    if len(group.living) == 1:
        return tree
    first = group.living[0]
    mean = group.mean_trees(tree, to=first)
    flat = None if mean is None else torch.cat([v.contiguous().view(-1) for v in mean.values()]).view(torch.uint8)
    sizes = [v.numel() for v in tree.values()]
    pieces = torch.split(group.spread(flat, 4 * sum(sizes), first).view(torch.float32), sizes)
    return {name: piece.view(v.shape).to(v.device) for (name, v), piece in zip(tree.items(), pieces, strict=True)}

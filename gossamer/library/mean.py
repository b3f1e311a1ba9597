"""The mean of the workers' anchors, at every one of them."""

from __future__ import annotations

import torch

from gossamer.core.tree import Tree
from gossamer.real.group import Group
from gossamer.worker.effects import Tag

_MEAN_TAG = Tag.of(2, 7)  # kind 7 is no program's


def mean_everywhere(group: Group, tree: Tree) -> Tree:
    """The plain mean of everybody's tree, the same bits at all; on the device of `tree`. All workers call it, in the same order of calls.
    Bytes: a tree to the lowest worker and back, for each; they are in no record.

    Raises:
        RunFailed: a worker is gone.
    """
    if len(group.living) == 1:
        return tree
    first = group.living[0]
    mean = group.mean_trees(tree, to=first)
    if mean is not None:
        flat = torch.cat([v.contiguous().view(-1) for v in mean.values()]).view(torch.uint8)
        for j in group.living:
            if j != first:
                group.transport.send(j, _MEAN_TAG, flat)
                group.apart_sent_bytes += flat.numel()
    else:
        size = 4 * sum(v.numel() for v in tree.values())
        receipt = group.transport.receive(first, _MEAN_TAG, size, lambda data: data)
        group.board.wait(lambda: receipt.done)
        group.apart_received_bytes += size
        pieces = torch.split(receipt.value.view(torch.float32), [v.numel() for v in tree.values()])
        mean = {name: piece.view(v.shape) for (name, v), piece in zip(tree.items(), pieces, strict=True)}
    return {name: v.to(tree[name].device) for name, v in mean.items()}

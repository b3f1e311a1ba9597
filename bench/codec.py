"""How fast the codecs are on one thread, against a plain copy of the same tree measured in turn with them.

    python -m bench.codec [--preset llama-134m] [--repeats 5]

For each codec, over random numbers in the shapes of the preset: encode (statistics known), statistics and encode, those with error
feedback as a round does it (gossamer.core.codec.write: e <- e + D, encode e, e <- e - decoded), and decode-and-add into a mean.
GB/s counts the float32 bytes that go in, by CPU time. A ratio is the median over the repeats of (time of the copy in that repeat / time
of the operation); "of copy" is against torch's copy_, "of copyto" against NumPy's, tensor by tensor. "Peak MB" is how far the resident
set of the process rises during the operation (empty where the system does not tell). Writes bench/results/codec.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.common import write
from gossamer.app.planning import memory
from gossamer.core.codec import Bf16, Codec, Fp16, Fp32, Int8, Sign, TopK
from gossamer.core.codec import write as write_payload
from gossamer.core.feedback import Feedback
from gossamer.core.tree import Layout, Tree, map_tree, numel, zeros_like
from gossamer.train.model import PRESETS, meta_layout

COPY, COPYTO = "copy_ (torch)", "copyto (numpy)"
CODECS: dict[str, Codec] = {
    "sign tensor": Sign(),
    "sign row": Sign(magnitude="row"),
    "sign block 256": Sign(magnitude="block"),
    "fp32": Fp32(),
    "fp16": Fp16(),
    "bf16": Bf16(),
    "int8 256": Int8(),
    "topk 1/64": TopK(),
}
Step = Callable[[], object]
CPU = torch.device("cpu")


def said(codec: Codec, tree: Tree, layout: Layout, out: torch.Tensor, residual: Tree | None) -> None:
    """What a round does between the drift and the packets, on a site of one rank."""
    writing = write_payload(codec, tree, layout, [(layout, out)], Feedback() if residual else None, residual)
    try:
        value = next(writing)
        while True:
            value = writing.send(value)
    except StopIteration:
        return


def operations(codec: Codec, tree: Tree, residual: Tree, acc: Tree, layout: Layout) -> dict[str, Step]:
    """What is measured of a codec."""
    stats, out = codec.stats(tree, layout), torch.zeros(codec.nbytes(layout), dtype=torch.uint8)
    found: dict[str, Step] = {"encode": lambda: codec.encode(tree, layout, stats, out)}
    if stats:
        found["stats + encode"] = lambda: said(codec, tree, layout, out, None)
    if codec.lossy:
        found["feedback + stats + encode"] = lambda: said(codec, tree, layout, out, residual)
    found["decode + add"] = lambda: codec.accumulate(out, layout, acc, 0.25)
    return found


def seconds(step: Step) -> float:
    """One run, in CPU time of this process, which has one thread: what else runs on the machine disturbs it less."""
    start_s = time.process_time()
    step()
    return time.process_time() - start_s


def peak_mb(step: Step) -> float | None:
    """How far the resident set rises above where it was; it ran before, so that its inputs and outputs are resident."""
    if not memory.can_reset():
        return None
    memory.reset_peak(CPU)
    before_gb = memory.used_gb(CPU)
    step()
    return max(0.0, 1000 * (memory.peak_gb(CPU) - before_gb))


def measure(layout: Layout, repeats: int) -> dict[str, dict[str, float | None]]:
    """Medians by operation."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    tree: Tree = {part.name: torch.randn(part.numel // part.row, part.row, generator=g) for part in layout}
    residual, acc = map_tree(torch.clone, tree), zeros_like(tree)
    copies: dict[str, Step] = {
        COPY: lambda: [acc[k].copy_(v) for k, v in tree.items()],
        COPYTO: lambda: [np.copyto(acc[k].numpy(), v.numpy()) for k, v in tree.items()],
    }
    nbytes, table = 4 * numel(layout), dict[str, dict[str, float | None]]()
    for title, codec in CODECS.items():
        steps = operations(codec, tree, residual, acc, layout)
        taken = [{name: seconds(step) for name, step in (copies | steps).items()} for _ in range(repeats + 1)][1:]  # the first warms up
        for name, step in (steps if table else copies | steps).items():
            table[name if name in copies else f"{title}: {name}"] = {
                "gb_s": nbytes / statistics.median(row[name] for row in taken) / 1e9,
                "of_copy": statistics.median(row[COPY] / row[name] for row in taken),
                "of_copyto": statistics.median(row[COPYTO] / row[name] for row in taken),
                "peak_mb": peak_mb(step),
            }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", default="llama-134m", choices=list(PRESETS), help="whose shapes (default llama-134m)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats, after one that warms up (default 5)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    layout = meta_layout(args.preset)
    table = measure(layout, args.repeats)
    print(f"{args.preset}, {numel(layout):,} float32, one thread, {args.repeats} repeats\n{'':42}  GB/s  of copy_  of copyto  peak MB")
    for name, row in table.items():
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:7.1f}"
        print(f"{name:42} {row['gb_s']:5.2f}    {row['of_copy']:5.2f}      {row['of_copyto']:5.2f}  {peak}")
    setting = {
        "preset": args.preset, "numel": numel(layout), "tensors": len(layout), "largest_tensor_mb": max(4e-6 * p.size for p in layout),
        "repeats": args.repeats, "threads": 1, "torch": torch.__version__, "numpy": np.__version__, "cores_on_machine": os.cpu_count(),
    }  # fmt: skip
    write("codec", {"setting": setting, "results": table})


if __name__ == "__main__":
    main()

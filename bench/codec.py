"""How fast the codecs are on one thread, against a plain copy of the same tensor measured in turn with them.

    python bench/codec.py [--numel 134217728] [--repeats 7]

GB/s counts the float32 bytes that go in. A ratio is the median over the repeats of (time of the copy in that repeat / time of the
operation); "of copy" is against torch's copy_, "of copyto" against NumPy's. Writes bench/results/codec.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from gossamer.core.codec import Bf16, Codec, Fp16, Fp32, Int8, Sign, TopK
from gossamer.core.tree import Layout, Tree, layout_of

COPY, COPYTO = "copy_ (torch)", "copyto (numpy)"
CODECS: list[tuple[str, Codec, int]] = [
    ("sign tensor", Sign(), 768),
    ("sign row 768", Sign(magnitude="row"), 768),
    ("sign row 96", Sign(magnitude="row"), 96),
    ("sign block 256", Sign(magnitude="block"), 768),
    ("fp32", Fp32(), 768),
    ("fp16", Fp16(), 768),
    ("bf16", Bf16(), 768),
    ("int8 256", Int8(), 768),
    ("topk 1/64", TopK(), 768),
]
"""Title, codec, elements of a row."""


def operations(title: str, codec: Codec, tree: Tree, acc: Tree) -> dict[str, Callable[[], object]]:
    """Encode, statistics with encode where there are some, and decode-and-add."""
    layout: Layout = layout_of(tree)
    stats = codec.stats(tree, layout)
    out = torch.zeros(codec.nbytes(layout), dtype=torch.uint8)
    codec.encode(tree, layout, stats, out)
    found: dict[str, Callable[[], object]] = {f"{title}: encode": lambda: codec.encode(tree, layout, stats, out)}
    if stats:
        found[f"{title}: stats + encode"] = lambda: codec.encode(tree, layout, codec.stats(tree, layout), out)
    found[f"{title}: decode + add"] = lambda: codec.accumulate(out, layout, acc, 0.25)
    return found


def measure(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians by operation."""
    torch.set_num_threads(1)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    y, acc = torch.zeros_like(x), torch.zeros_like(x)
    steps: dict[str, Callable[[], object]] = {
        COPY: lambda: y.copy_(x),
        COPYTO: lambda: np.copyto(y.numpy(), x.numpy()),
    }
    for title, codec, row in CODECS:
        rows = numel // row
        tree, sums = ({"w": t[: rows * row].view(rows, row)} for t in (x, acc))
        steps |= operations(title, codec, tree, sums)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start_s = time.perf_counter()
            step()
            if repeat:  # the first warms up
                times[name].append(time.perf_counter() - start_s)

    def ratio(name: str, to: str) -> float:
        return statistics.median(c / t for c, t in zip(times[to], times[name], strict=True))

    return {
        name: {"gb_s": 4 * numel / statistics.median(t) / 1e9, "of_copy": ratio(name, COPY), "of_copyto": ratio(name, COPYTO)}
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=int, default=1 << 27, help="float32 numbers in the tensor (default 134217728)")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats, after one that warms up (default 7)")
    args = parser.parse_args()
    if args.numel < 768 or args.repeats < 1:
        parser.error("--numel must be at least 768 and --repeats at least 1")
    table = measure(args.numel, args.repeats)
    print(f"{args.numel} float32, one thread, {args.repeats} repeats\n{'':32}  GB/s  of copy_  of copyto")
    for name, row in table.items():
        print(f"{name:32} {row['gb_s']:5.2f}    {row['of_copy']:5.2f}      {row['of_copyto']:5.2f}")
    target = Path(__file__).parent / "results" / "codec.json"
    target.parent.mkdir(exist_ok=True)
    setting = {"numel": args.numel, "repeats": args.repeats, "threads": 1, "torch": torch.__version__, "numpy": np.__version__}
    target.write_text(json.dumps({"setting": setting | {"cores_on_machine": os.cpu_count()}, "results": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()

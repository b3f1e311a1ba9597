"""One worker of the examples of loops, one after the other in one process: `python -m loop_worker OUT NAME...`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "loops"))


def main(out: Path, names: list[str]) -> None:
    before = dict(os.environ)
    for name in names:
        importlib.import_module(name).main(out)
        os.environ.clear()
        os.environ.update(before)  # `connect(alone=True)` has taken the launcher's variables out


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

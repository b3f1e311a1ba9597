"""`python -m gossamer` is the `gossamer` command."""

from __future__ import annotations

import sys

from gossamer.cli import main

if __name__ == "__main__":
    sys.exit(main())

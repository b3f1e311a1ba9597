"""What all tests share: one thread, no network, no display, and the same examples every time."""

from __future__ import annotations

import os

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HYPOTHESIS_STORAGE_DIRECTORY": ".cache/hypothesis",
}.items():
    os.environ[name] = value  # before torch is imported, and inherited by the processes that tests start

os.environ.pop("COLUMNS", None)  # of the terminal in which tests are started

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)

# Examples are drawn from the test's own source, so that a failure repeats; there is no limit on the time of one example, since a busy
# machine must not fail a test.
settings.register_profile("gossamer", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("gossamer")

"""What all tests share: one thread, no network, no display, and the same examples every time."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from small_runs import corpus  # noqa: E402

if TYPE_CHECKING:
    from coordinator_toys import Nursery, Process

torch.set_num_threads(1)

# Examples are drawn from the test's own source, so that a failure repeats; there is no limit on the time of one example, since a busy
# machine must not fail a test.
settings.register_profile("gossamer", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("gossamer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules whose tests may take long begin first, so that none of them is what everybody waits for in the end."""
    allowed_s: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("timeout")) is not None:
            allowed_s[item.nodeid.partition("::")[0]] += mark.args[0]
    items.sort(key=lambda item: -allowed_s[item.nodeid.partition("::")[0]])


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that a test runs in its own process sets up the logs of that process: they are put back."""
    logger, root = logging.getLogger("gossamer"), logging.getLogger()
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    of_root, hooks = list(root.handlers), (sys.excepthook, threading.excepthook)
    with warnings.catch_warnings():
        yield
        logging.captureWarnings(False)
    logger.handlers, logger.propagate, root.handlers = handlers, propagate, of_root
    logger.setLevel(level)
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a module's tests prepare of texts is kept for them alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files, for small runs."""
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def coordinators() -> Iterator[Nursery]:
    """Where processes of coordinators are forked."""
    from coordinator_toys import Nursery

    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def process(coordinators: Nursery, tmp_path: Path) -> Iterator[Process]:
    """A coordinator in a process of its own."""
    from coordinator_toys import Process

    made = Process(coordinators, tmp_path / "runs.db")
    yield made
    made.kill()

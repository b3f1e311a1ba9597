"""What those who watch a site see, of a process of the command line."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest
from ports import free
from test_wan_run import sets_of
from wan_run_toys import field

pytestmark = pytest.mark.usefixtures("cache")


def shows(port: int, name: str, value: float, timeout_s: float = 60.0) -> None:
    """Waits until a figure of the page has a value."""
    until_s, found = time.monotonic() + timeout_s, ""
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                page = answer.read().decode()
        except OSError:
            page = ""
        if match := re.search(rf"^{name}\{{.*\}} (.*)$", page, re.MULTILINE):
            found = match.group(1)
            if float(found) == value:
                return
        time.sleep(0.05)
    raise AssertionError(f"{name} is {found or 'not there'}, not {value}")


@pytest.mark.timeout(200)
def test_a_site_shows_whether_its_coordinator_is_there(text: Path, tmp_path: Path) -> None:
    page = free()
    with field(tmp_path / "wan", sets_of(text, 2, "diloco", wan__deadline_s=6.0), tls=False) as run:
        run.kill("coordinator")
        run.ends("coordinator", code=-9)
        run.join("lyon", options=("--metrics", f"127.0.0.1:{page}"))
        for _ in range(2):
            shows(page, "gossamer_coordinator_there", 0.0)
            run.coordinator()
            shows(page, "gossamer_coordinator_there", 1.0)
            run.kill("coordinator")
        shows(page, "gossamer_coordinator_there", 0.0)

"""A clock that jumps harms no run: what real runs wait for, they measure with a clock that does not jump."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gossamer

ROOT = Path(gossamer.__file__).parent
FILES = sorted([*ROOT.glob("wan/**/*.py"), *ROOT.glob("real/*.py"), *ROOT.glob("app/wan/*.py")])
STAMPS = {
    "wan/trust/certificates.py": "dates of certificates, which both ends compare with their own clock",
    "app/wan/logs.py": "the stamp of a line of the log, as the logger took it",
    "wan/roster/ended.py": "when a run came to its end, for people",
}
JUMPS = {
    "time": {"time", "time_ns", "ctime", "localtime", "gmtime", "asctime", "strftime", "clock_gettime"},
    "datetime": {"now", "utcnow", "today", "fromtimestamp", "utcfromtimestamp"},
    "date": {"today", "fromtimestamp"},
}


def reads_of(source: str) -> set[str]:
    """Calls, or mere mentions, of what tells the time of day."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in JUMPS.get(owner, ()):
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{a.name}" for a in node.names if a.name in JUMPS["time"]}
    return found


def test_only_certificates_and_what_people_read_look_at_the_time_of_day() -> None:
    assert len(FILES) > 40
    found = {path.relative_to(ROOT).as_posix(): reads_of(path.read_text()) for path in FILES}
    assert {name for name, reads in found.items() if reads} == set(STAMPS)
    assert found["wan/trust/certificates.py"] == found["wan/roster/ended.py"] == {"datetime.now"}
    assert found["app/wan/logs.py"] == {"time.strftime", "time.localtime", "datetime.fromtimestamp"}


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import date\ndate.today()",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert reads_of(source)
    assert not reads_of("import time\ntime.monotonic()")

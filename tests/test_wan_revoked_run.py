"""Sites whose certificates are revoked while they train, with real processes: the others go on without them, and they say why they stop."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_wan_run import sets_of
from test_wan_run_faults import meets
from test_wan_run_sessions import last
from wan_run_toys import Field, field

from gossamer.wan.roster.calls import ask_status
from gossamer.wan.roster.records import SiteStatus
from gossamer.wan.trust import ca, certificates
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.doors import Anybody
from gossamer.wan.trust.terms import Party, Terms, read_secret

pytestmark = pytest.mark.usefixtures("cache")


@contextmanager
def some_time_ago(seconds: float) -> Iterator[None]:
    """Certificates are made as if it were then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "now_utc", lambda: datetime.now(UTC) - timedelta(seconds=seconds))
        yield


def revoke(run: Field, site: str, at: str) -> None:
    """Revokes what a site has, and brings the list to one process alone."""
    ca.revoke(run.root / "ca", site)
    shutil.copy(run.root / "ca" / "revoked.pem", run.root / "ca" / "sites" / at / "revoked.pem")


def listed(run: Field, site: str) -> str:
    return (run.root / "ca" / "sites" / site / "revoked.pem").read_text()


def status(run: Field, asker: str) -> dict[str, SiteStatus]:
    """As `gossamer wan status` has it."""
    mine, terms = Identity.load(run.root / "ca" / "sites" / asker), Terms("status", read_secret(run.root / "run.secret"), None, None)
    found = ask_status(Dial(Party(terms, Anybody()), asker, f"127.0.0.1:{run.port}", None, mine).channel)
    return {one.site: one for one in found.runs[0].sites}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["diloco", "gasloc"])
@pytest.mark.parametrize("site, at", [("porto", "coordinator"), ("lyon", "oslo")])
def test_a_revoked_site_is_cut_off_and_says_so(method: str, site: str, at: str, text: Path, tmp_path: Path) -> None:
    more = {"method__topology": '"one_peer"'} if method == "gasloc" else {}
    sets = sets_of(text, 3, method, run__rounds=5000, clock__pace_s=0.1, eval__every=0, checkpoint__every=0, **more)
    with field(tmp_path / "wan", sets) as run:
        run.join("lyon", "oslo", "porto")
        meets(run, "porto", "lyon", "oslo")
        run.trains("porto", 2)
        others = [one for one in ("lyon", "oslo", "porto") if one != site]

        revoke(run, site, at)
        begun_s = time.monotonic()
        run.ends(site, code=1, timeout_s=30)
        said = run.log(site)
        assert re.search(rf"site {site} stops here: .*the certificate of site {site} \(serial [0-9a-f]+\) was revoked on \d{{4}}-", said), (
            said
        )
        assert f"gossamer wan ca issue {site}" in said and "Traceback" not in said and "never retrieved" not in said
        kept = int(re.search(rf"site {site} keeps its state after round (\d+)", said).group(1))  # type: ignore[union-attr]
        assert last(run, site, ("lyon", "oslo", "porto").index(site))[0] == kept > 0
        if method == "diloco":
            meets(run, others[0], others[1], timeout_s=30)
        while status(run, others[0])[site].standing != "out":
            assert time.monotonic() < begun_s + 30, "the coordinator has it still"
            time.sleep(0.1)
        found = status(run, others[0])
        assert [one for one in found if found[one].standing == "out"] == [site]
        for one in others:
            run.trains(one, 2)
        newest = listed(run, at)
        assert {listed(run, one) for one in ("coordinator", *others)} == {newest}, "the list has not reached all"
        assert "Traceback" not in "".join(run.log(one) for one in (*others, "coordinator"))

        # With another certificate it comes back.
        shutil.move(run.root / "ca" / "sites" / site, run.root / "old")
        ca.issue(run.root / "ca", site, ["127.0.0.1"])
        run.join(site)
        meets(run, site, *others)
        run.trains(site, 2)
        run.stops("lyon", "oslo", "porto")


@pytest.mark.timeout(400)
def test_a_certificate_that_ends_while_its_site_trains(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 3, "diloco", run__rounds=5000, clock__pace_s=0.1, eval__every=0, checkpoint__every=0)
    with field(tmp_path / "wan", sets) as run:
        shutil.move(run.root / "ca" / "sites" / "porto", run.root / "old")
        with some_time_ago(24 * 3600 - 25.0):
            ca.issue(run.root / "ca", "porto", ["127.0.0.1"], days=1)
        run.join("lyon", "oslo", "porto")
        meets(run, "porto", "lyon", "oslo")
        run.trains("porto", 1)
        run.ends("porto", code=1, timeout_s=60)
        said = run.log("porto")
        assert re.search(r"site porto stops here: .*the certificate of site porto expired on \d{4}-", said) and "Traceback" not in said, (
            said
        )
        assert "site porto keeps its state after round" in said
        meets(run, "lyon", "oslo", timeout_s=30)
        run.trains("lyon", 2)
        run.stops("lyon", "oslo")

"""The CA: what it makes, what it revokes, and folders that do not fit together."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from trust_toys import TERMS, identity, sites

from gossamer import BadInput, cli
from gossamer.wan.trust import ca, certificates
from gossamer.wan.trust.certificates import Identity, Revocations, load_authority
from gossamer.wan.trust.terms import new_secret, read_secret


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


def test_a_site_gets_what_it_needs_and_keys_are_its_owners_alone(tmp_path: Path) -> None:
    folder = ca.init(tmp_path / "ca", name="weather")
    before = datetime.now(UTC)
    site = ca.issue(folder, "lyon-1", ["192.0.2.7", "gpu.Example.org", "[2001:db8::1]"], days=10)
    assert site == folder / "sites" / "lyon-1"
    assert sorted(p.name for p in site.iterdir()) == ["ca.pem", "revoked.pem", "site.key", "site.pem"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, site, folder / "ca.key", site / "site.key")] == [0o700, 0o700, 0o600, 0o600]
    mine = Identity.load(site)
    found = mine.certificate
    assert (mine.site, found.hosts) == ("lyon-1", ("gpu.example.org", "192.0.2.7", "2001:db8::1"))
    assert abs((found.ends - before) - timedelta(days=10)) < timedelta(minutes=1)
    assert found.covers("GPU.example.org") and found.covers("2001:0db8::1") and not found.covers("192.0.2.8")
    signature = mine.sign(b"words")
    assert found.verify(signature, b"words") and not found.verify(signature, b"other words")
    assert "weather CA" in load_authority(folder / "ca.pem").subject.rfc4514_string()
    assert "PRIVATE" not in repr(mine) and "s" * 32 not in repr(TERMS)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = ca.init(tmp_path / "ca")
    ca.issue(folder, "a")
    files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for again in (lambda: ca.init(folder), lambda: ca.issue(folder, "a"), lambda: ca.issue(folder, "b", out=folder / "sites" / "a")):
        with pytest.raises(BadInput, match="is there already, and nothing is overwritten"):
            again()
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files
    new_secret(tmp_path / "secret")
    first = read_secret(tmp_path / "secret")
    with pytest.raises(BadInput, match="nothing is overwritten"):
        new_secret(tmp_path / "secret")
    assert read_secret(tmp_path / "secret") == first and len(first) == 32


def test_a_folder_that_could_not_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ca.init(tmp_path / "ca")
    real, written = os.fsync, []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        ca.issue(folder, "a")
    monkeypatch.undo()
    assert [p.name for p in (folder / "sites").iterdir()] == []
    ca.issue(folder, "a")
    Identity.load(folder / "sites" / "a")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda f: ca.issue(f, "Lyon"), "site 'Lyon': expected 1 to 63 of a-z"),
        (lambda f: ca.issue(f, "../up"), "expected 1 to 63 of a-z"),
        (lambda f: ca.issue(f, "a", ["10.0.0.1:7000"]), "without a port"),
        (lambda f: ca.issue(f, "a", ["10.0.0.999"]), "expected an IP address or a host name"),
        (lambda f: ca.issue(f, "a", ["b.gossamer.internal"]), "say which site a certificate is for"),
        (lambda f: ca.issue(f, "a", days=0), "--days 0"),
        (lambda f: ca.issue(f, "a", days=4000), r"is good until .*: use --days 36\d\d"),
        (lambda f: ca.issue(f / "no", "a"), "there is no CA: make one with gossamer wan ca init"),
        (lambda f: ca.revoke(f, "x"), "made no certificate for it"),
        (lambda f: ca.init(f / "new", name="\n"), "expected 1 to 40 printable"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, wrong: Callable[[Path], Any], message: str) -> None:
    folder = ca.init(tmp_path / "ca")
    with pytest.raises(BadInput, match=message):
        wrong(folder)
    assert not (folder / "sites").exists()


def test_revocations_add_up_and_are_listed(tmp_path: Path) -> None:
    folder = ca.init(tmp_path / "ca")
    for out in ("one", "two", "three"):
        ca.issue(folder, "a", out=tmp_path / out)
    first, second, third = (Identity.load(tmp_path / out).certificate for out in ("one", "two", "three"))
    [gone] = ca.revoke(folder, "a", f"{second.serial:X}")
    assert gone.certificate == second
    assert {one.certificate.serial: one.state for one in ca.listing(folder)} == {
        first.serial: "good", second.serial: "revoked", third.serial: "good",
    }  # fmt: skip
    assert {one.certificate for one in ca.revoke(folder, "a")} == {first, third}
    known = Revocations(folder / "revoked.pem", load_authority(folder / "ca.pem"))
    assert known.number == 3 and all(known.when(one.serial) for one in (first, second, third))
    with pytest.raises(BadInput, match="already revoked"):
        ca.revoke(folder, "a")
    with pytest.raises(BadInput, match="has no such certificate"):
        ca.revoke(folder, "a", "abc")


def test_a_list_is_taken_only_if_it_is_newer_and_the_ca_s(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, other = ca.init(tmp_path / "ca"), ca.init(tmp_path / "other")
    site = ca.issue(folder, "a")
    serial = Identity.load(site).certificate.serial
    file = site / "revoked.pem"
    known = Revocations(file, load_authority(folder / "ca.pem"))
    old = file.read_bytes()
    ca.revoke(folder, "a")
    new = (folder / "revoked.pem").read_bytes()
    assert known.when(serial) is None
    file.write_bytes(new)
    assert known.when(serial) is not None
    for bad in (old, (other / "revoked.pem").read_bytes(), new[:-40], b"", b"x" * (2 << 20)):
        file.write_bytes(bad)
        for _ in range(3):
            assert known.when(serial) is not None
        assert not known.offer(bad)
    file.unlink()
    assert known.when(serial) is not None
    assert sum("not taken" in r.message and str(file) in r.message for r in caplog.records) == 6  # once for each change of the file
    fresh = Revocations(folder / "revoked.pem", load_authority(folder / "ca.pem"))
    with pytest.raises(BadInput, match="cannot be used"):
        Revocations(file, load_authority(folder / "ca.pem"))
    file.write_bytes(old)
    late = Revocations(file, load_authority(folder / "ca.pem"))
    assert late.offer(fresh.pem) and not late.offer(fresh.pem)
    assert late.when(serial) and file.read_bytes() == fresh.pem


def test_a_folder_that_does_not_fit_together_is_refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, other = made / "ours" / "sites" / "b", made / "theirs" / "sites" / "b"

    def mixed(name: str, file: Path) -> Path:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        shutil.copy2(file, folder / name)
        return folder

    for name, source, message in (
        ("site.pem", other / "site.pem", "not signed by the CA"),
        ("site.key", other / "site.key", "not the key of"),
        ("ca.pem", good / "site.key", "not the certificate of a CA"),
        ("revoked.pem", other / "revoked.pem", "not signed by this CA"),
    ):
        with pytest.raises(BadInput, match=message):
            Identity.load(mixed(name, source))
    (tmp_path / "site.key" / "site.key").chmod(0o640)
    with pytest.raises(BadInput, match="chmod 600"):
        Identity.load(tmp_path / "site.key")
    with pytest.raises(BadInput, match=r"No such file.*gossamer wan ca issue"):
        Identity.load(tmp_path / "nowhere")
    for site, words in (("old", r"expired on \d{4}-\d\d-\d\d .* UTC, and it is .*gossamer wan ca issue old"), ("young", "set the clock")):
        with pytest.raises(BadInput, match=words):
            identity(made, site)
    monkeypatch.setattr(certificates, "now_utc", lambda: datetime.now(UTC) + timedelta(days=360))
    with pytest.raises(BadInput, match="expired"):
        identity(made, "old")
    assert identity(made, "b").site == "b"


def test_a_certificate_that_ends_soon_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Identity.load(ca.issue(ca.init(tmp_path / "ca"), "a", days=13))
    assert any("in 13.0 days: gossamer wan ca issue a" in r.message for r in caplog.records)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["wan", "ca", "init"]) == 0
    assert cli.main(["wan", "ca", "issue", "lyon", "--host", "192.0.2.7", "--host", "lyon.example.org", "--days", "30"]) == 0
    assert cli.main(["wan", "ca", "issue", "oslo", "--out", "elsewhere"]) == 0
    capsys.readouterr()
    assert cli.main(["wan", "ca", "revoke", "oslo"]) == 0
    assert "Bring ca/revoked.pem" in capsys.readouterr().out
    assert cli.main(["wan", "ca", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["site", "state"], ["lyon", "good"], ["oslo", "revoked"]]
    assert "lyon.example.org, 192.0.2.7" in lines[1]
    assert cli.main(["wan", "ca", "issue", "lyon"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert cli.main(["wan", "secret", "run.secret"]) == 0
    assert len(read_secret(tmp_path / "run.secret")) == 32
    assert stat.S_IMODE((tmp_path / "run.secret").stat().st_mode) == 0o600
    (tmp_path / "run.secret").chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        read_secret(tmp_path / "run.secret")
    (tmp_path / "run.secret").chmod(0o600)
    (tmp_path / "run.secret").write_text("hunter2")
    with pytest.raises(BadInput, match="expected 64 hexadecimal digits"):
        read_secret(tmp_path / "run.secret")

"""The commands `gossamer wan ca` and `gossamer wan secret`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from gossamer.core.errors import BadInput


def ca_init(folder: Path, *, name: str, days: int) -> None:
    """`gossamer wan ca init`."""
    _part("ca").init(folder, name=name, days=days)
    _say(f"CA: {folder}. Keep {folder / 'ca.key'} off the training machines: whoever has it can be any site")


def ca_issue(folder: Path, site: str, hosts: Sequence[str], *, days: int, out: Path | None) -> None:
    """`gossamer wan ca issue`."""
    path = _part("ca").issue(folder, site, hosts, days=days, out=out)
    _say(f"site {site}: bring {path} to its machine, by a way that nobody reads along (it holds the private key)")


def ca_revoke(folder: Path, site: str, *, serial: str | None) -> None:
    """`gossamer wan ca revoke`."""
    done = _part("ca").revoke(folder, site, serial)
    numbers = ", ".join(f"{one.certificate.serial:x}" for one in done)
    _say(f"site {site}: revoked {numbers}. Bring {folder / 'revoked.pem'} to one site or to the coordinator: the others take it from there")


def ca_list(folder: Path) -> None:
    """`gossamer wan ca list`."""
    certificates = _part("certificates")
    table = Table("site", "state", "until", "hosts", "serial", box=None, header_style="bold", pad_edge=False)
    for one in _part("ca").listing(folder):
        found = one.certificate
        until = one.revoked or found.ends
        table.add_row(found.site, one.state, certificates.date(until), ", ".join(found.hosts) or "-", f"{found.serial:x}")
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(emoji=False, highlight=False, width=200)
    console.print(table if table.row_count else f"{folder}: no certificates yet: make one with gossamer wan ca issue SITE")


def secret(path: Path) -> None:
    """`gossamer wan secret`."""
    _part("terms").new_secret(path)
    _say(f"run secret: {path}. Bring it to every site of the run and to the coordinator, as you bring private keys")


def _part(name: str) -> ModuleType:
    """A part of gossamer.wan.trust, which needs more than the rest of Gossamer does."""
    try:
        return importlib.import_module(f"gossamer.wan.trust.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("cryptography", "grpc"):
            raise
        raise BadInput(f"gossamer wan needs {error.name}, which is not installed: pip install 'gossamer[wan]'") from None


def _say(text: str) -> None:
    Console(emoji=False, highlight=False, soft_wrap=True).print(text, markup=False)

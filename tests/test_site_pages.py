"""The documentation site: every page has a place, every link and anchor leads somewhere, on the code host and in the site.

Building it takes a minute, so `make docs` does that, and refuses warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mkdocs_hooks as hooks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(DOCS.glob("*.md"))
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def nav(entry: Any = SITE["nav"]) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from nav(inner)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as both GitHub and Python-Markdown name them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[\s]+", "-", words) for words in plain}


def test_every_page_has_one_place_in_the_site() -> None:
    places = list(nav())
    there = {*(p.name for p in PAGES), *hooks.GENERATED}
    assert len(places) == len(set(places)) and not there ^ set(places), f"mkdocs.yml, nav: add or remove {there ^ set(places)}"
    assert all((ROOT / source).is_file() for source in hooks.GENERATED.values())


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_every_anchor_leads_to_a_heading(path: Path) -> None:
    for _, target, anchor in re.findall(r"\[([^\[\]]+)\]\(([^)\s#:]*)#([^)\s]+)\)", _FENCE.sub("", path.read_text(encoding="utf-8"))):
        page = path.parent / target if target else path
        assert anchor in anchors(page), f"{target}#{anchor}"


def test_links_out_of_docs_are_turned_and_others_stay() -> None:
    text = "[a](wan.md#check) [b](../gossamer/worker/peer.py) [c](../gossamer/net) [d](../CHANGELOG.md) [e](https://x.org/y)"
    want = "[a](wan.md#check) [b](source/gossamer/worker/peer.py) c [d](changelog.md) [e](https://x.org/y)"
    assert hooks.rewritten(text, DOCS) == want
    assert hooks.rewritten("[a](docs/wan.md) [b](LICENSE) ![c](docs/figures/worlds.svg)", ROOT) == (
        "[a](wan.md) [b](source/LICENSE) ![c](figures/worlds.svg)"
    )


def test_the_api_page_names_modules_that_exist() -> None:
    for name in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M):
        path = ROOT / Path(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


def test_docstrings_are_markdown() -> None:
    """The site prints the roles of Sphinx as they stand."""
    role = re.compile(r":(?:attr|class|data|exc|func|meth|mod|ref):`")
    for path in sorted((ROOT / "gossamer").rglob("*.py")):
        assert not role.search(path.read_text(encoding="utf-8")), f"{path}: write `name`, without a role"

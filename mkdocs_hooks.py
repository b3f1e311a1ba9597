"""What the site adds to docs/: the README as its home, the changelog, and the files of the repository that pages link to.

Pages link to sources as where the code is hosted (`../gossamer/worker/peer.py`). In the site such a file lies under source/; a link to a
folder becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
GENERATED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository."""
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages, and every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    pages = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in GENERATED.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=rewritten(text, ROOT)))
    texts = [(DOCS, path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md"))]
    for where, text in [*texts, *((ROOT, text) for text in pages.values())]:
        for match in _LINK.finditer(text):
            name = source_of(where / match[2])
            if name is not None and files.get_file_from_path(f"source/{name}") is None:
                files.append(File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns the links of a page of docs/ that lead out of it."""
    return markdown if page.file.src_uri in GENERATED else rewritten(markdown, DOCS)


def source_of(target: Path) -> str | None:
    """The name within the repository of a file outside docs/ that can be shown as it is; None: none such. A page in Markdown is none."""
    path = target.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(DOCS) or path.suffix == ".md":
        return None
    return path.relative_to(ROOT).as_posix()


def rewritten(text: str, where: Path) -> str:
    """The links of a text that stands in the folder `where`, as of a page in docs/."""

    def turned(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = (where / target).resolve()
        if path.is_relative_to(DOCS) and path.exists():
            return f"[{words}]({path.relative_to(DOCS).as_posix()}{anchor})"
        if (page := next((page for page, source in GENERATED.items() if path == ROOT / source), None)) is not None:
            return f"[{words}]({page}{anchor})"
        name = source_of(path)
        return words if name is None else f"[{words}](source/{name})"

    return _LINK.sub(turned, text)

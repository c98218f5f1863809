"""For mkdocs: the site also has the pages and programs that lie outside of this folder.

In the site the README is the first page, and `docs/` is not there: links are changed to fit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PROGRAMS = ["benchmarks/*.png", "keras_examples/*.py", "Dockerfile"]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)]+)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds what lies outside."""
    files.remove(files.src_uris["hooks.py"])
    files.append(_outside("index.md", ROOT / "README.md", config))
    for name in OUTSIDE:
        files.append(_outside(name, ROOT / name, config))
    for pattern in PROGRAMS:
        for path in ROOT.glob(pattern):
            files.append(_outside(str(path.relative_to(ROOT)), path, config))
    return files


def _outside(uri: str, path: Path, config: Any) -> File:
    return File.generated(config, uri, abs_src_path=str(path))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Makes links fit the places that pages have in the site."""
    uri = page.file.src_uri
    source = Path(page.file.abs_src_path)

    def changed(link: re.Match[str]) -> str:
        target, hash_sign, anchor = link[1].partition("#")
        path = (source.parent / target).resolve().relative_to(ROOT)
        name = "index.md" if path == Path("README.md") else str(path).removeprefix("docs/")
        depth = uri.count("/")
        return f"{'../' * depth}{name}{hash_sign}{anchor}"

    return _LINK.sub(changed, markdown)

"""Adds the pages and programs outside this folder to the mkdocs site.

The site has no `docs/`, and its first page is the README. Links are changed to fit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
FIRST_PAGE = (Path("README.md"), Path("docs/README.md"))  # the site's contents replace the index
PROGRAMS = ["benchmarks/*.png", "keras_examples/*.py", "keras_examples/*/*.yaml", "Dockerfile"]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)]+)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside this folder."""
    for name in ("hooks.py", "README.md"):
        files.remove(files.src_uris[name])
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
    """Rewrites links for the places of pages in the site."""
    uri = page.file.src_uri
    source = Path(page.file.abs_src_path)

    def changed(link: re.Match[str]) -> str:
        target, hash_sign, anchor = link[1].partition("#")
        path = (source.parent / target).resolve().relative_to(ROOT)
        name = "index.md" if path in FIRST_PAGE else str(path).removeprefix("docs/")
        depth = uri.count("/")
        return f"{'../' * depth}{name}{hash_sign}{anchor}"

    return _LINK.sub(changed, markdown)

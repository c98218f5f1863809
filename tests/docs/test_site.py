"""No link of the documentation is dead, and every public name is in the API reference."""

import functools
import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

from tests.test_public_api import NAMESPACES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "keras_examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
HOMES = {"tf_gradcomp": "index"}
# Functions that the documented ops share.
SHARED_INTERFACE = ("tf_gradcomp.ops.payload.decode", "tf_gradcomp.ops.payload.put_back")


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@functools.cache
def anchors(page):
    """Yields the anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def links(page):
    """Yields the links to files of the repository, and to headings."""
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page.read_text())):
        if not target.startswith(("http://", "https://")):
            yield target


def site_pages(folder, monkeypatch):
    """Returns the files that the site is made of, by their places in the repository."""
    program = runpy.run_path(str(ROOT / "docs" / "site.py"))
    monkeypatch.setitem(program["main"].__globals__, "PAGES", folder)
    program["main"]()
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_in_the_site_s_contents():
    contents = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", contents, re.M)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def test_the_site_has_all_files_that_its_pages_link_to(tmp_path, monkeypatch):
    copied = site_pages(tmp_path, monkeypatch)
    for page in PAGES:
        for target in links(page):
            name = target.partition("#")[0]
            file = (page.parent / name).resolve() if name else page
            assert file.relative_to(ROOT) in copied, (page, target)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_is_in_the_reference(namespace):
    module = importlib.import_module(namespace)
    page = ROOT / "docs" / "reference" / f"{HOMES.get(namespace, namespace.split('.')[-1])}.md"
    documented = []
    for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
        home, _, name = path.rpartition(".")
        if path not in SHARED_INTERFACE:
            documented.append(getattr(importlib.import_module(home), name))
    public = [getattr(module, name) for name in module.__all__ if name != "__version__"]
    names = [value for value in public if not inspect.ismodule(value)]
    assert sorted(map(id, documented)) == sorted(map(id, names))

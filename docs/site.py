"""Makes `build/pages`, the folder that the site is built from.

Some pages and the programs that they link to lie outside this folder, and the site's tool reads
one folder. So the pages keep their places in the repository, and with them their links.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
CONTENTS = (
    "*.md",
    "Dockerfile",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/*.png",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/**/*.svg",
    "docs/site.css",
    "keras_examples/**/*",
)


def main() -> None:
    """Copies the contents of the site, to the same places below `build/pages`."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in CONTENTS:
        for path in ROOT.glob(pattern):
            if path.is_file() and path.suffix != ".pyc":
                copy = PAGES / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


if __name__ == "__main__":
    main()

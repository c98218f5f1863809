"""Checks prose that ruff does not: sentences, cells of tables, and subjects of commits.

    python tests/prose.py

`python3 dev.py lint` runs it. The lists of exceptions only shrink.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("benchmarks", "keras_examples", "tests", "tf_gradcomp", "dev.py", "setup.py")
LONGEST_SENTENCE = 30  # words, in a docstring
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
MOST_WORDS = 15  # of a cell: a table holds values, and a paragraph explains
LONGEST_SUBJECT = 72
MAIN = ("origin/main", "main")


def files(places: tuple[str, ...], suffix: str) -> Iterator[Path]:
    """Yields the files to check, by path."""
    for index in places:
        found = [ROOT / index] if index.endswith(suffix) else sorted((ROOT / index).rglob("*"))
        for file in found:
            if file.suffix == suffix:
                yield file


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each docstring."""
    for file in files(CODE, ".py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if text := ast.get_docstring(node):
                yield place(file, node.body[0].lineno), text


def long_sentences() -> Iterator[str]:
    """Yields the sentences of docstrings that have more than `LONGEST_SENTENCE` words."""
    for where, text in docstrings():
        for paragraph in re.split(r"\n\s*\n", text):
            if any(is_command(line) for line in paragraph.splitlines()):
                continue
            for sentence in re.split(r"(?<=[.:;?!])\s+", paragraph.strip()):
                if (words := len(sentence.split())) > LONGEST_SENTENCE:
                    start = " ".join(sentence.split()[:8])
                    yield f"{where}: {words} words in a sentence: {start}"


def is_command(line: str) -> bool:
    """Returns whether a docstring's line is a command, a row of a table, or Click's `\\b`."""
    return line.strip() == "\b" or line.startswith(("    ", "|", "gradcomp ", "python"))


def long_cells() -> Iterator[str]:
    """Yields the cells of tables that have more than `MOST_WORDS`."""
    for file in files(PAGES, ".md"):
        text = re.sub(r"^```.*?^```$", blank, file.read_text(), flags=re.M | re.S)
        for index, line in enumerate(text.splitlines(), 1):
            cells = line.strip().strip("|").split("|") if line.startswith("|") else []
            for cell in cells:
                if (words := len(cell.split())) > MOST_WORDS:
                    yield f"{place(file, index)}: {words} words in a cell: {cell.strip()[:50]}"


def blank(code: re.Match) -> str:
    """Returns empty lines in place of code, so that line numbers stay right."""
    return "\n" * code[0].count("\n")


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def long_subjects() -> Iterator[str]:
    """Yields the long subjects of the commits that main does not have, or of the last commit."""
    try:
        base = next(filter(None, (git("merge-base", "HEAD", name) for name in MAIN)), None)
    except FileNotFoundError:
        print("subjects of commits: not checked, because git is not installed")
        return
    if base is None:
        print(f"subjects of commits: not checked, for there is no {' or '.join(MAIN)} here")
        return
    subjects = git("log", "--format=%h %s", f"{base}..HEAD") or git("log", "-1", "--format=%h %s")
    for line in (subjects or "").splitlines():
        name, _, subject = line.partition(" ")
        if len(subject) > LONGEST_SUBJECT:
            yield f"commit {name}: {len(subject)} characters in the subject: {subject}"


def git(*arguments: str) -> str | None:
    """Returns what git prints, or None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def main() -> int:
    """Prints all faults; returns the exit code."""
    faults = list(long_sentences())
    faults += [*long_cells(), *long_subjects()]
    print("\n".join(faults or ["prose: no faults"]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())

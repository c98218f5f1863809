"""Known names that a misspelled name may mean. Loads nothing, so the command line may use it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_ALIKE = 0.7  # of difflib's ratio of equal letters


def near(name: str, known: Sequence[str]) -> list[str]:
    """Returns the known names that are most like a name, by their letters alone."""
    plain = {_letters(name): name for name in known}
    letters = _letters(name)
    found = difflib.get_close_matches(letters, list(plain), cutoff=_ALIKE)
    return [plain[name] for name in ([letters] if letters in found else found)]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))

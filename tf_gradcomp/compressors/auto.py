"""The choice between methods, made when a job starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import Compressor

BASELINE = "no_compression"
# Each was measured to train about as well as dense: docs/advise.md has the limits and figures.
CANDIDATES = (BASELINE, "cast", "adacomp")


@registry.register
class Auto:
    """The fastest of some methods for this model, on this network and these machines.

    It is no compressor itself, but is given wherever one is asked for. When the optimizer is built,
    all workers time their collectives and the methods for about a second, add up how long the
    exchange of a step will take with each, and take the same one. The log says which, and what was
    predicted for all; `gc.advise` tells it beforehand.

    Use it where a program runs on different networks. By default it chooses only between methods
    that train about as well as dense: `"no_compression"`, `"cast"` and, unless Adam would have to
    do without its second moment in front, `"adacomp"`. Among candidates of yours it chooses by
    time alone: list those that are good enough. If `"no_compression"` is one of them, another has
    to be faster by a twentieth. State is kept for all, because a job that resumes chooses again.
    With one replica nothing is exchanged or chosen.

    Args:
        candidates: Compressors, their names or their configs.

    Raises:
        ValueError: If there is none, or one is itself a choice.
    """

    name: ClassVar[str] = "auto"

    def __init__(
        self, candidates: Sequence[str | Mapping[str, Any] | Compressor] = CANDIDATES
    ) -> None:
        if isinstance(candidates, (str, Mapping, Compressor)) or not candidates:
            raise ValueError(
                f"Auto: expected a list of candidates such as {list(CANDIDATES)}; received "
                f"{candidates!r}."
            )
        self.candidates: tuple[Compressor, ...] = tuple(map(registry.get, candidates))
        if not all(isinstance(candidate, Compressor) for candidate in self.candidates):
            raise ValueError("Auto: a candidate must be a method; received another Auto.")

    def from_baseline(self) -> list[Compressor]:
        """The dense baseline, and after it the other candidates."""
        return [
            registry.get(BASELINE),
            *(candidate for candidate in self.candidates if candidate.name != BASELINE),
        ]

    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""
        return {"candidates": [registry.serialize(candidate) for candidate in self.candidates]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Auto:
        """The choice with the settings that `get_config` returned."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"Auto(candidates={list(self.candidates)!r})"


def methods_of(compressor: Compressor | Auto, *, lags: bool = False) -> tuple[Compressor, ...]:
    """The methods that may be used: the compressor itself, or the candidates of a choice.

    Args:
        compressor: What the user gave.
        lags: Whether methods that Adam's second moment helps may have to do without it. Training
            lags then, so that they are no default candidates.
    """
    if not isinstance(compressor, Auto):
        return (compressor,)
    if lags and compressor.get_config() == Auto().get_config():
        return tuple(one for one in compressor.candidates if not one.helped_by_precondition)
    return compressor.candidates

"""The choice between methods, made when a job starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import Compressor

BASELINE = "no_compression"
DEFAULT = "adacomp"  # of gc.CompressedOptimizer
# Each was measured to train about as well as dense: see docs/benchmarks/accuracy.md.
CANDIDATES = (BASELINE, "cast", DEFAULT)


@registry.register
class Auto:
    """The fastest of some methods for this model, on this network and these machines.

    `Auto` is not itself a compressor, but a placeholder for the chosen compressor. When the
    optimizer is built, all workers time their collectives and the methods for about a second. They
    predict each method's time for a step's exchange, and choose the same method. The log names the
    choice and all predictions; `gc.advise` predicts them beforehand.

    Use it if a program runs on different networks. By default it chooses only between methods that
    train about as well as dense: `"no_compression"`, `"cast"` and, unless gradients would not be
    divided by Adam's second moment, `"adacomp"`. Among your own candidates, it chooses by time
    alone: list only methods that are good enough. If `"no_compression"` is a candidate, another
    method must be faster by a twentieth. The exchange keeps the state of all candidates, because a
    resumed job chooses again. With one replica, nothing is exchanged or chosen.

    Args:
        candidates: Compressors, their names or their configs.

    Raises:
        ValueError: If there are no candidates, or a candidate is itself a choice.
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
        compressor: The user's argument.
        lags: Whether methods that need the division by Adam's second moment may not get it.
            Training with such methods then lags, so they are not default candidates.
    """
    if not isinstance(compressor, Auto):
        return (compressor,)
    if lags and compressor.get_config() == Auto().get_config():
        return tuple(
            candidate for candidate in compressor.candidates if not candidate.helped_by_precondition
        )
    return compressor.candidates

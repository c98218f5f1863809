"""The choice between methods, made when a job starts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import Compressor, Exchanged, ExchangeInputs, StateSpec
from tf_gradcomp.compressors.wishes import Wish
from tf_gradcomp.policy import GradientSpec

BASELINE = "no_compression"
CANDIDATES = (BASELINE, "cast", "adacomp", "scalecom")


class Auto(Compressor):
    """The fastest of some methods for this model, on this network and these machines.

    When the optimizer is built, all workers time their collectives and the methods for about
    a second, add up how long the exchange of a step will take with each, and take the same one. The
    log says which, and what was predicted for all; `gc.advise` tells it beforehand.

    Use it where a program runs on different networks. It chooses by time alone: the methods differ
    in what they cost in accuracy, so list those that are good enough. State is kept for all of
    them, as a job that resumes chooses anew. With one replica nothing is exchanged or chosen.

    Args:
        candidates: Compressors, their names or their configs.

    Raises:
        ValueError: If there is none, or one is itself a choice, or filters its residual, so that no
            other can go on with it.
    """

    name = "auto"

    def __init__(
        self, candidates: Sequence[str | Mapping[str, Any] | Compressor] = CANDIDATES
    ) -> None:
        super().__init__()
        if isinstance(candidates, (str, Mapping, Compressor)) or not candidates:
            raise ValueError(
                f"Auto: expected a list of candidates such as {list(CANDIDATES)}; received "
                f"{candidates!r}."
            )
        self.candidates = tuple(registry.get(candidate) for candidate in candidates)
        for candidate in self.candidates:
            if candidate.candidates:
                raise ValueError("Auto: a candidate must be a method; received another Auto.")
            if candidate.residual_scale != 1:
                raise ValueError(
                    f"Auto: no other method can go on with the residual of {candidate!r}; name "
                    "one whose residual is what was not sent (of ScaleCom, beta=1)."
                )

    def from_baseline(self) -> list[Compressor]:
        """The candidates, behind the dense baseline."""
        return [
            registry.get(BASELINE),
            *(candidate for candidate in self.candidates if candidate.name != BASELINE),
        ]

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """Nothing: the candidates say what they keep."""
        return {}

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """There is none before the choice.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            '"auto" chooses by the network between the workers of a job, and there is none here; '
            f"name a method, such as {CANDIDATES[-1]!r}."
        )

    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""
        return {"candidates": [registry.serialize(candidate) for candidate in self.candidates]}

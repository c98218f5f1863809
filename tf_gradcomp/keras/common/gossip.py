"""Settings of gossip: workers average weights only with their neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_gradcomp import compressors
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.round_lengths import Schedule

RING = "ring"
_DEFAULT_METHOD = "adacomp"  # of CompressedOptimizer


class Gossip(LocalSteps):
    """Settings of gossip, for `CompressedOptimizer(local_steps=...)`.

    Each worker has its own weights. After every `steps` steps, its weights move towards the weights
    of its neighbours in a graph; no exchange involves all workers. Neighbours send each other
    products of their weights with a vector that both know. These products show the most important
    part of the difference between their weights. Evaluation, saving and the end of an epoch use the
    mean of all workers' weights. docs/gossip.md explains when gossip pays.

    Args:
        graph: `"ring"`, in which a worker's neighbours are the workers before and after it.
        rank: The rank of the matrices by which neighbours move towards each other. None sends all
            weights uncompressed. Vectors, and matrices with at most `rank` rows or columns, are
            always sent uncompressed.
        steps: The number of steps between two exchanges, or a schedule: see `gc.LocalSteps`.
        outer: A Keras optimizer that updates a worker's weights at the end of a round, its config
            or its name. Its gradient is the change of the weights by the local steps and the
            neighbours.
        warmup_steps: The number of synchronous first steps. The compressor exchanges gradients in
            these steps only.
        diffusion: How far neighbours move. With 1, a worker and its neighbours have equal shares
            in the worker's mean. Slightly larger numbers make weights agree fastest.

    Raises:
        TypeError: If `outer` is not an optimizer.
        ValueError: If the graph is unknown, a number is out of its range, or `outer` cannot be an
            outer optimizer.

    Reference:
        Vogels et al., "PowerGossip: Practical Low-Rank Communication Compression in Decentralized
        Deep Learning", NeurIPS 2020, https://arxiv.org/abs/2008.01425
    """

    def __init__(
        self,
        graph: str = RING,
        rank: int | None = 1,
        steps: Schedule = 1,
        outer: Any = None,
        warmup_steps: int = 0,
        diffusion: float = 1.0,
    ) -> None:
        if graph != RING:
            raise ValueError(f"Gossip: expected {RING!r} as graph; received {graph!r}.")
        if rank is not None and not is_whole_number(rank, 1, 2**31):
            raise ValueError(
                f"Gossip: expected a whole number as rank, at least 1, or None; received {rank!r}."
            )
        if not 0 < diffusion < 2:
            raise ValueError(
                f"Gossip: expected a diffusion above 0 and below 2; received {diffusion!r}."
            )
        super().__init__(steps, outer, warmup_steps)
        self.graph = graph
        self.rank = None if rank is None else int(rank)
        self.diffusion = float(diffusion)

    def get_config(self) -> dict[str, Any]:
        """Returns the config, for `settings_of`."""
        of_rounds = super().get_config()
        return {
            "graph": self.graph,
            "rank": self.rank,
            "diffusion": self.diffusion,
            **{name: of_rounds[name] for name in ("steps", "outer", "warmup_steps")},
        }

    def share(self, size: int) -> float:
        """Returns the share of a neighbour in a worker's mean.

        Raises:
            ValueError: If the neighbours' shares leave nothing for the worker's own weights, so
                that training would diverge.
        """
        neighbours = min(2, size - 1)
        share = self.diffusion / (neighbours + 1)
        if share * neighbours >= 1:
            raise ValueError(
                f"Gossip: with diffusion={self.diffusion} and {neighbours} neighbours, a worker "
                "has no share in its own mean; expected a diffusion below "
                f"{(neighbours + 1) / neighbours}."
            )
        return share


def settings_of(given: Any) -> LocalSteps | None:
    """Returns the settings of local steps, or of gossip, from the argument `local_steps`.

    Raises:
        ValueError: If the argument is invalid.
    """
    if isinstance(given, Mapping) and "graph" in given:
        return Gossip(**given)
    return LocalSteps.of(given)


def uses_compressor(settings: LocalSteps | None) -> bool:
    """Returns whether a compressor is used: with gossip, only in the steps of a warm-up."""
    return not isinstance(settings, Gossip) or settings.warmup_steps > 0


def method_for_gradients(settings: LocalSteps | None, method: Any) -> Any:
    """Returns the method that exchanges gradients; with gossip, only a warm-up does so.

    Raises:
        ValueError: If the method would never be used.
    """
    if uses_compressor(settings):
        return method
    if compressors.text_of(method) not in (_DEFAULT_METHOD, BASELINE):
        raise ValueError(
            f"CompressedOptimizer: gossip has its own compression of weights, and "
            f"{compressors.text_of(method)!r} would exchange nothing. Leave out the compressor, or "
            "pass gc.Gossip(..., warmup_steps=...): it exchanges gradients during the warm-up."
        )
    return compressors.get(BASELINE)

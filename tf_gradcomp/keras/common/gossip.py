"""Settings of gossip: workers average their weights with those of their neighbours only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_gradcomp import compressors
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.compressors.per_variable import is_whole_number
from tf_gradcomp.keras.common.gossip_graphs import GRAPHS, degree
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.round_lengths import AUTO, Schedule

_DEFAULT_METHOD = "adacomp"  # of CompressedOptimizer


class Gossip(LocalSteps):
    """Settings of gossip, for `CompressedOptimizer(local_steps=...)`.

    Each worker has weights of its own. After every `steps` steps, it moves towards its neighbours
    in a graph, and no exchange is among all workers. Neighbours do not send their weights. They
    multiply them by a vector that both know, and so learn the most important part of their
    difference. Evaluation, saving and the end of an epoch use the mean of all workers' weights.
    docs/gossip.md tells when this pays, and where it loses.

    Args:
        graph: `"ring"`; `"torus"`, for a number of workers that is a product; `"fully_connected"`;
            or `"random_pairs"`: in each round another partner for each worker. If their number is
            odd, one of them rests.
        rank: Neighbours move towards each other by a matrix of this rank. None sends weights whole,
            as are all vectors, and matrices that have no more rows or columns than `rank`.
        steps: The number of steps between two exchanges, or a schedule: see `gc.LocalSteps`.
        outer: A Keras optimizer, its config or its name. It is given how far steps and neighbours
            have moved a worker, in place of a gradient, and moves the worker instead. NoLoCo is
            `Gossip("random_pairs", rank=None, steps=50, outer=SGD(0.7, momentum=0.5))`.
        warmup_steps: The first so many steps of training are synchronous: the compressor exchanges
            gradients in each of them. It has no other use.
        diffusion: How far neighbours move: 1 gives a worker and its neighbours equal weight in its
            mean. The fastest number is somewhat above 1.

    Raises:
        TypeError: If `outer` is no optimizer.
        ValueError: If there is no such graph, a number is out of its range, or `outer` cannot be an
            outer optimizer.

    Reference:
        Vogels et al., "PowerGossip: Practical Low-Rank Communication Compression in Decentralized
        Deep Learning", NeurIPS 2020, https://arxiv.org/abs/2008.01425; and for pairs Kolehmainen et
        al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025,
        https://arxiv.org/abs/2506.10911
    """

    def __init__(
        self,
        graph: str = "ring",
        rank: int | None = 1,
        steps: Schedule = 1,
        outer: Any = None,
        warmup_steps: int = 0,
        diffusion: float = 1.0,
    ) -> None:
        if graph not in GRAPHS:
            raise ValueError(
                f"Gossip: expected a graph of {', '.join(GRAPHS)}; received {graph!r}."
            )
        if rank is not None and not is_whole_number(rank, 1, 2**31):
            raise ValueError(
                f"Gossip: expected a whole number as rank, at least 1, or None; received {rank!r}."
            )
        if steps == AUTO:
            raise ValueError(
                'Gossip: steps="auto" needs a vote of all workers; give a number or a schedule.'
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
            ValueError: If there is no such graph of so many workers, or if nothing is left for the
                worker's own weights, so that workers would move apart.
        """
        neighbours = degree(self.graph, size)
        share = self.diffusion / (neighbours + 1)
        if share * neighbours >= 1:
            raise ValueError(
                f"Gossip: diffusion={self.diffusion} leaves a worker with {neighbours} neighbours "
                f"nothing of its own weights; expected less than {(neighbours + 1) / neighbours}."
            )
        return share


def settings_of(given: Any) -> LocalSteps | None:
    """Returns the settings of local steps, or of gossip, that `local_steps` stands for.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(given, Mapping) and "graph" in given:
        return Gossip(**given)
    return LocalSteps.of(given)


def method_beside(settings: LocalSteps | None, method: Any) -> Any:
    """Returns the method that exchanges gradients: with gossip, it does so in a warm-up only.

    Raises:
        ValueError: If the method would have no use.
    """
    if not isinstance(settings, Gossip) or settings.warmup_steps:
        return method
    if compressors.text_of(method) not in (_DEFAULT_METHOD, BASELINE):
        raise ValueError(
            f"CompressedOptimizer: gossip sends differences of weights in its own way, and "
            f"{compressors.text_of(method)!r} would exchange nothing. Leave the compressor out, or "
            "give gc.Gossip(..., warmup_steps=...), in which it exchanges gradients."
        )
    return compressors.get(BASELINE)

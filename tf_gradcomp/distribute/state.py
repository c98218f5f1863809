"""What a compressor keeps from step to step, for all gradients of an exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import Compressor, StateSpec
from tf_gradcomp.policy import GradientSpec


def state_specs(
    compressor: Compressor,
    specs: Sequence[GradientSpec],
    preconditioner: Preconditioner | None = None,
) -> dict[str, list[StateSpec]]:
    """The state of each gradient by name, in the order of `specs`: of all that keeps any.

    That is the method, its warm-up, its candidates and the preconditioner.

    Raises:
        ValueError: If two keep state of one name in different shapes.
    """
    state: dict[str, list[StateSpec]] = {}
    keepers: list[Compressor | Preconditioner] = [*_stages(compressor)]
    if preconditioner:
        keepers.append(preconditioner)
    for keeper in keepers:
        own = [keeper.state(spec) for spec in specs]
        for name in own[0] if own else ():
            of_all = [of_one[name] for of_one in own]
            shapes = [of_one.shape for of_one in of_all]
            known = [of_one.shape for of_one in state.setdefault(name, of_all)]
            if shapes != known:
                raise ValueError(
                    f"{compressor!r}: the {name} of its warm-up or of a candidate has another "
                    "shape; use settings that keep the same."
                )
    return state


def _stages(compressor: Compressor) -> Iterator[Compressor]:
    yield compressor
    for other in (compressor.warmup, *compressor.candidates):
        if other:
            yield from _stages(other)


def new_variables(
    compressor: Compressor,
    specs: Sequence[GradientSpec],
    preconditioner: Preconditioner | None,
) -> dict[str, list[keras.Variable]]:
    """The state as variables, one for each replica, by name and in the order of `specs`."""
    return {
        name: [
            keras.Variable(
                keras.initializers.Zeros(),
                shape=of_one.shape,
                dtype="float32",
                trainable=False,
                synchronization="on_read",
                aggregation="only_first_replica" if of_one.shared else "sum",
                name=f"{spec.path.replace('/', '_')}_{name}",
            )
            for of_one, spec in zip(of_all, specs, strict=True)
        ]
        for name, of_all in state_specs(compressor, specs, preconditioner).items()
    }


def shared_variable(initial: Any, dtype: str, name: str) -> keras.Variable:
    """One that is equal on all replicas."""
    return keras.Variable(
        initial, dtype=dtype, trainable=False, aggregation="only_first_replica", name=name
    )

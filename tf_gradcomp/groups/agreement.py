"""Checks that all workers are about to exchange the gradients of the same variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.groups.group import Group

LATER_LIST_SECONDS = 600.0  # how long one worker may trace a new step alone


class GradientAgreement:
    """Compares with other workers, while a step is traced, which variables have gradients.

    Workers compare once for each set of variables, and not at each trace, because some workers
    trace more often than others. A worker with a smaller last batch, for example, traces again.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreed: set[tuple[tuple[str, str], ...]] = set()

    def check(
        self,
        paths: Sequence[str],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        progress: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Compares which variables have gradients.

        Args:
            paths: The paths of the variables.
            gradients: One gradient for each path.
            progress: Returns facts by name, such as the number of exchanges so far; if given, the
                first call compares them.

        Raises:
            WorkersDisagreeError: On every worker, naming the variables that differ.
        """
        forms = ["sparse" if isinstance(g, tf.IndexedSlices) else "dense" for g in gradients]
        given = tuple(zip(paths, forms, strict=True))
        if given in self._agreed:
            return
        with tf.init_scope():
            facts: dict[str, Any] = {f"gradient of {path!r}": form for path, form in given}
            facts["next action"] = "exchanging gradients"
            if progress is not None and not self._agreed:
                facts.update(progress())
            # Other workers may know this list and be in a step with another list: then they never
            # come.
            self._group.processes.agree(facts, LATER_LIST_SECONDS if self._agreed else None)
        self._agreed.add(given)

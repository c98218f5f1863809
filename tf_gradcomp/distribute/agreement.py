"""All workers must be about to exchange the gradients of the same variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_gradcomp.distribute.group import Group


class GradientAgreement:
    """Asks the other workers while a step is traced, once for each set of variables.

    Not at each trace, for workers need not trace as often as each other: one whose last batch is
    smaller traces once more.

    Args:
        group: The replicas.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreed: set[tuple[tuple[str, str], ...]] = set()

    def check(
        self,
        paths: Sequence[str],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        step: Callable[[], tf.Variable] | None = None,
    ) -> None:
        """Compares which variables have gradients.

        Args:
            paths: Of the variables.
            gradients: One for each.
            step: Gives the number of exchanges so far, to be compared at first as well.

        Raises:
            WorkersDisagreeError: On every worker, naming the variables that differ.
        """
        forms = ["sparse" if isinstance(g, tf.IndexedSlices) else "dense" for g in gradients]
        given = tuple(zip(paths, forms, strict=True))
        if given in self._agreed:
            return
        with tf.init_scope():
            facts: dict[str, str | int] = {f"gradient of {path!r}": form for path, form in given}
            facts["next action"] = "exchanging gradients"
            if step is not None and not self._agreed:
                facts["exchanges so far"] = int(step().numpy())
            self._group.agree(facts)
        self._agreed.add(given)

"""tensorflow-addons, if the program has imported it: we never do."""

from __future__ import annotations

import sys

from tf_gradcomp.keras.common.version import keras


def optimizers() -> dict[str, type]:
    """Its optimizers by name."""
    addons = sys.modules.get("tensorflow_addons.optimizers")
    base = keras.optimizers.legacy.Optimizer
    return {
        name: value
        for name, value in (vars(addons) if addons else {}).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }

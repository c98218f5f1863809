"""What the setting `precondition` means for an inner optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors import Compressor

AUTO, LOCAL = "auto", "local"


def chosen(
    setting: str | None,
    possible: Preconditioner | None,
    compressor: Compressor,
    optimizer: object,
    allowed: Iterable[type],
) -> Preconditioner | None:
    """The preconditioner that `precondition=setting` puts in front of a compressor, if any.

    Args:
        setting: `"auto"`, `"local"` or None.
        possible: What the inner optimizer allows.
        compressor: The method; `"auto"` preconditions only those that train better so.
        optimizer: The inner optimizer, without a loss scaler around it.
        allowed: The classes of optimizers that can be preconditioned, for messages.

    Raises:
        ValueError: If `setting` is none of these, or the optimizer cannot be preconditioned.
    """
    if setting not in (AUTO, LOCAL, None):
        raise ValueError(f'precondition: expected "auto", "local" or None; received {setting!r}.')
    if setting == LOCAL and possible is None:
        names = ", ".join(dict.fromkeys(class_.__name__ for class_ in allowed))
        raise ValueError(
            f'precondition="local" is for {names}; received {type(optimizer).__name__}. Use '
            'precondition="auto", which leaves others as they are.'
        )
    if setting is None or (setting == AUTO and not compressor.helped_by_precondition):
        return None
    return possible

"""Notice to users that a restart would begin from zero."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.noted_saves import may_be_restarted

_RESUMES = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


def tell_if_nothing_is_saved(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Tells the user at the start of `fit` that a restarted job would begin from zero."""
    if may_be_restarted() and not any(isinstance(one, _RESUMES) for one in callbacks):
        tell_user(
            "gradcomp run would restart this job from zero, because fit saves nothing: add "
            "gc.callbacks.BackupAndRestore(folder) to its callbacks."
        )

"""The optimizer and the strategy hooks for Keras 3."""

from tf_gradcomp.keras_version import check_is_keras_3

check_is_keras_3()

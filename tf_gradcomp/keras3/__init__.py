"""What is for Keras 3: the optimizer and the hooks of the strategy."""

from tf_gradcomp.keras_here import check_is_keras_3

check_is_keras_3()

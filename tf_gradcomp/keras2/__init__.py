"""The door for Keras 2, as `tf.keras`: the optimizer and the hooks of the strategy."""

"""The optimizer and the strategy hooks for Keras 2, as `tf.keras`."""

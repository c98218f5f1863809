"""The optimizer, the strategy hooks and the callbacks, for Keras 3 and Keras 2."""

"""The door for Keras 3: the optimizer, the hooks of the strategy, the callbacks."""

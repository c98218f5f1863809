"""What is for Keras 3: the optimizer, the hooks of the strategy, the callbacks."""

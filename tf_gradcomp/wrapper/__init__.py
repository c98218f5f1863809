"""What the `CompressedOptimizer` of either Keras is made of."""

"""Parts that Keras 2 and Keras 3 share."""

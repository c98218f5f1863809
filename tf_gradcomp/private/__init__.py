"""All private API of TensorFlow and Keras that this package uses; no other folder uses any.

Each function says why the public API is not enough. `tests/test_private_api.py` has a test for each
name, which fails when a release changes it.
"""

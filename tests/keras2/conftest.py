"""These tests need Keras 2 as `tf.keras`: `python3 dev.py test --keras2`."""

from tf_gradcomp.keras_version import IS_KERAS_2

collect_ignore_glob = [] if IS_KERAS_2 else ["test_*.py"]

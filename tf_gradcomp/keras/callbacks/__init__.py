"""Keras callbacks for compressed training, one in a file; `tf_gradcomp.callbacks` offers them."""

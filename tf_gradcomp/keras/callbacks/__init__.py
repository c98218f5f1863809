"""Keras callbacks for compressed training; `tf_gradcomp.callbacks` offers them."""

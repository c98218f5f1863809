"""`gc.MultiWorkerMirroredStrategy`, on top of TensorFlow's own."""

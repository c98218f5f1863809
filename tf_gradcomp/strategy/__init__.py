"""`gc.MultiWorkerMirroredStrategy`, on top of that of TensorFlow."""

"""What works with either Keras: callbacks, `gc.Policy`, `gc.advise`, LGC's autoencoder."""

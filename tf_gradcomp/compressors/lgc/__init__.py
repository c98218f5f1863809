"""Learned gradient compression (LGC): the method, its stages, and the state of its autoencoder."""

"""Learned gradient compression (LGC): the method, its phases, and the state of its autoencoder."""

"""Functions that replace parts of Keras 3; `patches.py` lists them with reasons."""

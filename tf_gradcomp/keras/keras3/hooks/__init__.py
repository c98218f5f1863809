"""Functions that replace parts of Keras 3; `patches.py` says which are in use, and why."""

#!/bin/sh
# Python, but a program's file is run in a process that has TensorFlow loaded: see preloaded.py.
exec "$PRELOADED_PYTHON" -I -S "${0%.sh}.py" "$@"

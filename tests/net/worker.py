"""Runs on a worker of a real job: checks programs one after another, and reports each one's faults.

If replicas differed in their faults, they would wait for each other until the deadline.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import tensorflow as tf

from tests.net import checks, product
from tests.net.program import read


def main() -> None:
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")
    product.workers()  # TensorFlow wants to know of its cluster before anything runs
    wrong = []
    for check, text in json.loads(sys.argv[1]):
        try:
            getattr(checks, check)(read(text))
            wrong.append("")
        except AssertionError as error:
            wrong.append(str(error))
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump(wrong, file)


if __name__ == "__main__":
    main()

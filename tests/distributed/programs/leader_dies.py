"""Trains with ScaleCom; worker 1 kills itself when it is to broadcast, in its second turn."""

import os
import signal

import keras
import tensorflow as tf
from common import Setup, dense_model, digits

from tests.ranks import RANK
from tf_gradcomp import compressors
from tf_gradcomp.compressors.requests import Broadcast

LAST_STEP = 3


def die_if_last(step):
    if step == LAST_STEP:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(compressors.ScaleCom, registered=False):
    """ScaleCom's step up to a broadcast."""

    name = "dying"

    def reduce(self, inputs):
        requests, answer = super().reduce(inputs), None
        while True:
            try:
                request = requests.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Broadcast) and RANK == 1:
                with tf.control_dependencies([tf.py_function(die_if_last, [inputs.step], [])]):
                    request = Broadcast(tf.identity(request.payload), request.root)
            answer = yield request


setup = Setup("optimizer", Dying(8))
model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
model.fit(*digits(320), batch_size=32, verbose=0)

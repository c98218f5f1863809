"""Workers train separate copies of a Transformer by Muon, and exchange them every 16 steps.

gradcomp run -n 2 local_steps.py     # for links with a long delay
"""

import pydoc_data.topics

import keras
import numpy as np
from attention_muon import AttentionMuon

import tf_gradcomp as gc

SEQUENCE = 64  # characters
WIDTH = 128
ROUND = 16  # steps between two exchanges
BATCH = 32
EPOCHS = 2

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")  # Python's help
codes = np.frombuffer(text, np.uint8).astype("int32")
rows = len(codes) // SEQUENCE - 1
rows -= rows % (BATCH * ROUND)  # an epoch has whole rounds, because its end also ends a round
steps = EPOCHS * rows // BATCH
x = codes[: rows * SEQUENCE].reshape(rows, SEQUENCE)
y = codes[1 : rows * SEQUENCE + 1].reshape(rows, SEQUENCE)  # one character later


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.table


def block(x):
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu")(y)
    return x + keras.layers.Dense(WIDTH)(y)


with strategy.scope():
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    hidden = block(block(Positions()(keras.layers.Embedding(128, WIDTH)(tokens))))
    logits = keras.layers.Dense(128, name="logits")(keras.layers.LayerNormalization()(hidden))
    model = keras.Model(tokens, logits)
    model.compile(
        optimizer=gc.CompressedOptimizer(
            # Each worker has its own state of this one. The last layer is AdamW's.
            AttentionMuon(
                keras.optimizers.schedules.CosineDecay(
                    0.0, steps - steps // 20, warmup_target=0.016, warmup_steps=steps // 20
                ),
                exclude_layers=["logits"],
            ),
            compressor="cast",
            local_steps=ROUND,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(
    x,
    y,
    batch_size=BATCH,
    epochs=EPOCHS,
    callbacks=[gc.callbacks.CompressionMonitor()],  # logs rounds and drift
    verbose=2 if gc.is_chief(strategy) else 0,
)

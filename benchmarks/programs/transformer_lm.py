"""A small Transformer as a character-level language model, trained on one worker or on many.

    python transformer_lm.py
    gradcomp run -n 4 transformer_lm.py --compressor adacomp
    gradcomp run -n 2 transformer_lm.py --dataset my_text.txt
    gradcomp run -n 2 transformer_lm.py --size large --optimizer muon --local-steps 16

Training uses the usual recipe: AdamW or Muon, a linear warm-up, a cosine decay to zero, and
clipping. The text comes with Python itself, or from your own file. The batch size is the global
one, over all workers. The small model has 0.43 million weights, the large one 10.7 million.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
import common
import keras
import texts

import tf_gradcomp as gc

sys.path.append(str(Path(__file__).resolve().parents[2] / "keras_examples"))

from attention_muon import AttentionMuon

EPOCHS = 10
STEPS_PER_EPOCH = 200
LEARNING_RATE = 2e-3


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model: its blocks, the heads of each, and the width of a position."""

    blocks: int
    heads: int
    width: int


SIZES = {"small": Size(2, 4, 128), "large": Size(6, 6, 384)}


def build_model(characters: int, size: Size) -> keras.Model:
    tokens = keras.Input((texts.SEQUENCE,), dtype="int32")
    x = keras.layers.Embedding(characters, size.width)(tokens)
    x = Positions()(x)
    for _ in range(size.blocks):
        x = block(x, size)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(characters, name="logits")(x))


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position in the sequence."""

    def build(self, shape: tuple[int | None, int, int]) -> None:
        """Makes the table: float32 [sequence, width]."""
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """The same shape: [batch, sequence, width]."""
        return x + self.table


def block(x: keras.KerasTensor, size: Size) -> keras.KerasTensor:
    y = keras.layers.LayerNormalization()(x)
    attention = keras.layers.MultiHeadAttention(size.heads, size.width // size.heads)
    x = x + attention(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * size.width, activation="gelu")(y)
    return x + keras.layers.Dense(size.width)(y)


def make_optimizer(name: str, steps: int, learning_rate: float) -> keras.optimizers.Optimizer:
    warmup = steps // 20
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=learning_rate, warmup_steps=warmup
    )
    if name == "adamw":
        return keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
    return AttentionMuon(
        schedule,
        weight_decay=0.01,
        adam_weight_decay=0.01,
        global_clipnorm=1.0,
        exclude_layers=["logits"],
    )


def compiled_model(optimizer: keras.optimizers.Optimizer, size: Size) -> keras.Model:
    model = build_model(len(texts.ALPHABET), size)
    return common.compiled(model, optimizer, texts.bits_per_character)


def train(
    *,
    size: str,
    optimizer: str,
    compressor: str,
    precondition: str | None,
    local_steps: int | None,
    epochs: int,
    steps_per_epoch: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    dataset: str | None,
    history: str | None,
) -> None:
    """Trains on this worker, and reports if it is the chief."""
    job = common.start_job(horovod=False)  # (1) before any other use of TensorFlow
    # All workers shuffle in the same order, and each takes its own part of every batch.
    keras.utils.set_random_seed(seed)
    text, held_out = texts.load(dataset)
    validation = texts.in_order(held_out, batch_size)

    with job.strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = compiled_model(
            gc.CompressedOptimizer(  # (3) around your optimizer
                make_optimizer(optimizer, epochs * steps_per_epoch, learning_rate),
                compressor,
                precondition=precondition,
                local_steps=local_steps,
            ),
            SIZES[size],
        )
    fitted = common.fit(
        job,
        model,
        texts.shuffled(text, batch_size, seed),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=validation,
    )

    _, bits = model.evaluate(validation, verbose=0)
    if gc.is_chief(job.strategy):
        print(f"Perplexity of held-out text: {2**bits:.3f}")
        common.write_fitted(history, job, model, fitted, steps_per_epoch)


def simulation_task(batch_size: int = 32, seed: int = 0) -> gc.simulation.Task:
    """For `gradcomp simulate transformer_lm.py`: the same training, by learners in one process."""
    keras.utils.set_random_seed(seed)
    text, held_out = texts.load(None)
    optimizer = make_optimizer("adamw", EPOCHS * STEPS_PER_EPOCH, LEARNING_RATE)
    model = compiled_model(optimizer, SIZES["small"])
    batches = texts.shuffled(text, batch_size, seed).take(STEPS_PER_EPOCH)
    return gc.simulation.Task(model, batches, STEPS_PER_EPOCH, texts.in_order(held_out, batch_size))


@click.command(context_settings={"show_default": True})
@click.option("--size", default="small", type=click.Choice(list(SIZES)), help="Of the model.")
@click.option("--optimizer", default="adamw", type=click.Choice(["adamw", "muon"]))
@common.compressor_option
@common.precondition_option
@common.local_steps_option
@click.option("--epochs", default=EPOCHS, help="The learning rate is zero at their end.")
@click.option("--steps-per-epoch", default=STEPS_PER_EPOCH)
@click.option("--batch-size", default=32, help="Sequences of a batch over all workers.")
@click.option("--learning-rate", default=LEARNING_RATE, help="The highest learning rate.")
@click.option("--seed", default=0, help="Seed of the weights and the order of the sequences.")
@click.option("--dataset", metavar="FILE", help="A text of yours in place of Python's own.")
@common.history_option
def main(**settings: Any) -> None:
    """Train a character-level Transformer on text."""
    train(**settings)


if __name__ == "__main__":
    main()

"""A character-level LSTM, trained on one worker or on many.

    python char_lstm.py
    gradcomp run -n 4 char_lstm.py --compressor adacomp
    gradcomp run -n 2 char_lstm.py --dataset my_text.txt
    horovodrun -np 2 python char_lstm.py --horovod --compressor adacomp

The text comes with Python itself, or from your own file. The batch size is the global one, over all
workers. The final measure is the number of bits per character of held-out text.
"""

from __future__ import annotations

from typing import Any

import click
import common
import keras
import texts

import tf_gradcomp as gc

STEPS_PER_EPOCH = 200
LEARNING_RATES = {"adam": 2e-3, "sgd": 0.5}


def build_model(characters: int, layers: int = 1, width: int = 256) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((texts.SEQUENCE,), dtype="int32"),
            keras.layers.Embedding(characters, 64),
            *(keras.layers.LSTM(width, return_sequences=True) for _ in range(layers)),
            keras.layers.Dense(characters, name="logits"),
        ]
    )


def make_optimizer(name: str, learning_rate: float | None = None) -> keras.optimizers.Optimizer:
    learning_rate = learning_rate or LEARNING_RATES[name]
    if name == "adam":
        return keras.optimizers.Adam(learning_rate)
    return keras.optimizers.SGD(learning_rate, momentum=0.9, global_clipnorm=1.0)


def compiled_model(optimizer: keras.optimizers.Optimizer, **sizes: int) -> keras.Model:
    model = build_model(len(texts.ALPHABET), **sizes)
    return common.compiled(model, optimizer, texts.bits_per_character)


def train(
    *,
    compressor: str,
    precondition: str | None,
    local_steps: int | None,
    horovod: bool,
    epochs: int,
    steps_per_epoch: int,
    batch_size: int,
    optimizer: str,
    learning_rate: float | None,
    seed: int,
    dataset: str | None,
    history: str | None,
) -> None:
    """Trains on this worker, and reports if it is the chief."""
    job = common.start_job(horovod)  # (1) gc.MultiWorkerMirroredStrategy(); comes first
    # All workers shuffle in the same order, and each takes its own part of every batch.
    keras.utils.set_random_seed(seed)
    text, held_out = texts.load(dataset)
    train = job.local_part(texts.shuffled(text, batch_size, seed), batch_size)
    validation = texts.in_order(held_out, batch_size)

    with job.strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = compiled_model(
            gc.CompressedOptimizer(  # (3) around your optimizer
                make_optimizer(optimizer, learning_rate),
                compressor,
                precondition=precondition,
                local_steps=local_steps,
                group=job.group,
            )
        )
    fitted = common.fit(
        job,
        model,
        train,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=validation,
    )

    _, bits = model.evaluate(validation, verbose=0)
    if gc.is_chief(job.strategy):
        print(f"Held-out text takes {bits:.3f} bits per character")
        common.write_fitted(history, job, model, fitted, steps_per_epoch)


def simulation_task(
    batch_size: int = 32, seed: int = 0, optimizer: str = "adam", dataset: str | None = None
) -> gc.simulation.Task:
    """For `gradcomp simulate char_lstm.py`: the same training, by learners in one process."""
    keras.utils.set_random_seed(seed)
    text, held_out = texts.load(dataset)
    model = compiled_model(make_optimizer(optimizer))
    batches = texts.shuffled(text, batch_size, seed).take(STEPS_PER_EPOCH)
    validation = texts.in_order(held_out, batch_size)
    return gc.simulation.Task(model, batches, STEPS_PER_EPOCH, validation)


@click.command(context_settings={"show_default": True})
@common.compressor_option
@common.precondition_option
@common.local_steps_option
@common.horovod_option
@click.option("--epochs", default=20)
@click.option("--steps-per-epoch", default=STEPS_PER_EPOCH)
@click.option("--batch-size", default=32, help="Sequences of a batch over all workers.")
@click.option("--optimizer", type=click.Choice(list(LEARNING_RATES)), default="adam")
@click.option("--learning-rate", type=float, help="By default 0.002 for Adam, 0.5 for SGD.")
@click.option("--seed", default=0, help="Seed of the weights and the order of the sequences.")
@click.option("--dataset", metavar="FILE", help="A text of yours in place of Python's own.")
@common.history_option
def main(**settings: Any) -> None:
    """Train a character-level LSTM on text."""
    train(**settings)


if __name__ == "__main__":
    main()

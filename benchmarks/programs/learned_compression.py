"""Learned gradient compression on handwritten digits: LGC, with pictures of its autoencoder.

    gradcomp run -n 2 learned_compression.py
    gradcomp run -n 2 learned_compression.py --pattern parameter_server --results pictures

The first steps are dense. In the next steps, the autoencoder is trained, and then it codes the
gradients. A picture shows its error over training, and a vector of gradients before and after
coding. With one worker, nothing is exchanged or learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import common
import keras
import numpy as np
from digits_cnn import build_model

import tf_gradcomp as gc


def train(
    *,
    pattern: str,
    density: float,
    dense_steps: int,
    training_steps: int,
    epochs: int,
    batch_size: int,
    seed: int,
    results: str,
) -> None:
    """Trains on this worker; the chief then draws what the autoencoder has learned."""
    strategy = gc.MultiWorkerMirroredStrategy()  # (1) before any other use of TensorFlow
    is_chief = gc.is_chief(strategy)
    keras.utils.set_random_seed(seed)
    (train_x, train_y), test = common.load_images("digits", seed)
    used_rows = len(train_x) // batch_size * batch_size
    compressor = gc.compressors.LGC(
        pattern, density, warmup_steps=dense_steps, training_steps=training_steps
    )
    with strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = build_model(train_x.shape[1:], classes=10)
        optimizer = gc.CompressedOptimizer(  # (3)
            keras.optimizers.SGD(0.05, momentum=0.9),
            compressor,
            gc.Policy.from_model(model),  # it knows the first and the last layer
        )
        common.compiled(model, optimizer)
    training, seen = gc.callbacks.AutoencoderTraining(), Errors()
    model.fit(
        train_x[:used_rows],
        train_y[:used_rows],
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[gc.callbacks.CompressionMonitor(), training, seen],
        verbose=2 if is_chief else 0,
    )
    loss, accuracy = model.evaluate(*test, verbose=0)
    if not is_chief:
        return
    print(f"Test accuracy {accuracy:.2%}, loss {loss:.4f}")
    vectors = training.last_vectors
    autoencoder = training.autoencoder
    if vectors is None or autoencoder is None:
        print("Nothing was learnt: start several workers, for more steps.")
        return
    print(f"Phase {seen.phases[-1]}; the error in the last step of training: {seen.errors[-1]:.3f}")
    autoencoder.summary(expand_nested=True)
    Path(results).mkdir(parents=True, exist_ok=True)
    autoencoder.save(Path(results, "autoencoder.keras"))
    draw(Path(results, "learned_compression.png"), seen, *before_and_after(autoencoder, vectors))


class Errors(keras.callbacks.Callback):
    """Keeps the logs of `AutoencoderTraining` for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[int] = []
        self.errors: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds a step."""
        if logs and "lgc_phase" in logs:
            self.phases.append(logs["lgc_phase"])
            self.errors.append(logs["autoencoder_error"])


def before_and_after(
    autoencoder: gc.Autoencoder, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the workers' vectors, and the decoded mean of their latents."""
    latents = keras.ops.mean(autoencoder.encoder(vectors[:, :, np.newaxis]), 0, keepdims=True)
    decoded = keras.ops.convert_to_numpy(autoencoder.decode(latents))
    return vectors.mean(0), decoded[0, :, 0]


def draw(path: Path, seen: Errors, before: np.ndarray, after: np.ndarray) -> None:
    """The error of the autoencoder over the steps, and a vector."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    learning = [step for step, error in enumerate(seen.errors) if error]
    left.plot(learning, [seen.errors[step] for step in learning])
    left.set(xlabel="step", ylabel="relative squared error", title="The autoencoder, in training")
    right.plot(before, label="before: the workers' mean")
    right.plot(after, label="after: decoded")
    right.set(xlabel="entry", title="The last vector that it was trained with")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@click.command(context_settings={"show_default": True})
@click.option(
    "--pattern", type=click.Choice(["all_reduce", "parameter_server"]), default="all_reduce"
)
@click.option("--density", default=0.01, help="The share of a layer's entries that is sent.")
@click.option("--dense-steps", default=44)
@click.option("--training-steps", default=150)
@click.option("--epochs", default=20)
@click.option("--batch-size", default=64, help="Rows of a batch over all workers.")
@click.option(
    "--seed", default=0, help="Seed of the split, the weights and the order of the images."
)
@click.option("--results", default="results", help="Write the picture into this folder.")
def main(**settings: Any) -> None:
    """Train a convolutional network on digits, with gradients coded by a learnt autoencoder."""
    train(**settings)


if __name__ == "__main__":
    main()

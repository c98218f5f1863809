"""Runs the Python of pages of the documentation, on each of two workers: NAME,... FOLDER.

A name is a page's, or a section's of a page. All share one strategy. This module provides the parts
that they leave to the reader, such as data.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

sys.path.append(str(Path(__file__).resolve().parents[2] / "keras_examples"))

from attention_muon import AttentionMuon

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = 256


ALONE = "# In a program of one process:\n"
RECIPES = {
    "learning_rate": "The learning rate and the number of workers",
    "precision": "Mixed precision, accumulation, clipping",
    "fit": "What `fit` takes",
    "fine_tuning": "Fine-tuning a pretrained model",
    "train_step": "A `train_step` of your own",
    "gan": "Two optimizers: a GAN",
    "several_models": "Several models",
}
SECTIONS = {
    **{name: ("recipes", heading) for name, heading in RECIPES.items()},
    "muon": ("local_steps", "Muon inside"),
}


def text(name):
    """The text of a page, or of a section."""
    page, title = SECTIONS.get(name, (name, None))
    whole = (DOCS / f"{page}.md").read_text()
    if title is None:
        return whole
    _, heading, rest = whole.partition(f"\n## {title}\n")
    assert heading, name
    return rest.partition("\n## ")[0]


def code(name, single=False):
    """The Python of a page as one program: the part for workers, or the part for one process."""
    blocks = re.findall(r"^```python\n(.*?)^```", text(name), re.M | re.S)
    return "\n".join(block for block in blocks if block.startswith(ALONE) == single)


def given(strategy, folder):
    """Defines the names that the pages leave to the reader."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(1024, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    return {
        "keras": keras,
        "np": np,
        "tf": tf,
        "gc": gc,
        "strategy": strategy,
        "folder": folder,
        "x": x,
        "y": y,
        "dataset": tf.data.Dataset.from_tensor_slices((x[:ROWS], y[:ROWS])).batch(32),
        "images": tf.data.Dataset.from_tensor_slices(x[:ROWS]).batch(32),
        "rows": tf.data.Dataset.from_tensor_slices(x).batch(64),
    }


def train_step_uncompressed(names):
    """The page's program, in a form in which two workers train like one process."""
    wrapped = "gc.CompressedOptimizer(keras.optimizers.SGD(0.05))"
    program = code("train_step")
    assert wrapped in program
    exec(program.replace(wrapped, wrapped[:-1] + ', "no_compression")'), names)
    return [weight.tolist() for weight in names["model"].get_weights()]


def digest(weights):
    return [float(np.sum(np.abs(array))) for array in weights]


def losses(model):
    return model.history.history["loss"]


def run_train_step(names):
    found = {"weights": digest(names["model"].get_weights()), "losses": losses(names["model"])}
    return {**found, "uncompressed": train_step_uncompressed(given(names["strategy"], None))}


def run_gan(names):
    gan = names["gan"]
    traffic = [
        optimizer.exchange.traffic() for optimizer in (gan.optimizer, gan.discriminator_optimizer)
    ]
    return {
        "weights": digest(gan.get_weights()),
        "metrics": sorted(gan.history.history),
        "exchanges": [one.exchanges for one in traffic],
        "compressors": [
            optimizer.exchange.compressor.name
            for optimizer in (gan.optimizer, gan.discriminator_optimizer)
        ],
        "smaller": [one.payload_bytes < one.dense_bytes for one in traffic],
    }


def run_several_models(names):
    models = [names[name] for name in ("teacher", "student", "encoder", "decoder")]
    return {
        "weights": digest(weight for model in models for weight in model.get_weights()),
        "losses": losses(names["student"]),
        "rows": len(names["labels"]),
        "together": [float(loss) for loss in names["losses"]],
    }


def run_fine_tuning(names):
    exchange = names["model"].optimizer.exchange
    steps = exchange.traffic().exchanges
    return {
        "weights": digest(names["model"].get_weights()),
        "losses": losses(names["model"]),
        "elements": [
            names["head_bytes"] // 4 // steps,
            exchange.traffic().dense_bytes // 4 // steps,
        ],
    }


def run_fit(names):
    models = [names["model"], names["classifier"]]
    return {
        "weights": digest(weight for model in models for weight in model.get_weights()),
        "epochs": len(names["stopped"].epoch),
        "losses": names["stopped"].history["val_loss"],
    }


def run_learning_rate(names):
    model = names["model"]
    return {
        "weights": digest(model.get_weights()),
        "losses": losses(model),
        "rate": float(model.optimizer.learning_rate),
        "steps": int(model.optimizer.iterations.numpy()),
    }


def run_precision(names):
    optimizer = names["model"].optimizer
    return {
        "weights": digest(names["model"].get_weights()),
        "losses": losses(names["model"]),
        "outer": type(optimizer).__name__,
        "exchanges": optimizer.inner_optimizer.exchange.traffic().exchanges,
    }


def run_checkpoints(names):
    loaded = names["loaded"].predict(names["x"], verbose=0)
    return {
        "rows": len(names["predictions"]),
        "difference": float(np.max(np.abs(loaded - names["predictions"]))),
        "weights": digest(names["model"].get_weights()),
        "optimizer": type(names["model"].optimizer).__name__,
    }


def attention():
    """Returns a small model with attention, for the data of the pages."""
    inputs = keras.Input((8,))
    tokens = keras.layers.Reshape((4, 2))(inputs)
    tokens = keras.layers.Dense(8)(tokens)
    tokens += keras.layers.MultiHeadAttention(2, 3, name="attention")(tokens, tokens)
    pooled = keras.layers.Flatten()(tokens)
    return keras.Model(inputs, keras.layers.Dense(1, name="logits")(pooled))


def run_muon(names):
    found = {"weights": [], "losses": []}
    x, y = names["x"], names["y"]
    with names["strategy"].scope():
        inner = AttentionMuon(0.02, exclude_layers=["logits"])
        sparse = gc.CompressedOptimizer(inner, "top_k(density=0.05)", local_steps=4)
    for optimizer in (names["optimizer"], sparse):
        keras.utils.set_random_seed(0)
        with names["strategy"].scope():
            model = attention()
            model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=64, epochs=3, verbose=0)
        found["weights"] += digest(model.get_weights())
        found["losses"] = losses(model)
        found["adam"] = [
            variable.path
            for variable in model.trainable_variables
            if optimizer.inner_optimizer._should_use_adamw(variable)
        ]
    return found


def run_data(names):
    return {
        "weights": digest(names["model"].get_weights()),
        "first": digest([next(iter(names["batches"]))[0].numpy()]),
    }


def main():
    strategy = gc.MultiWorkerMirroredStrategy()
    found = {}
    for page in sys.argv[1].split(","):
        print("page", page, flush=True)
        names = given(strategy, sys.argv[2])
        # The section has no model, so it leaves the scope to the reader.
        with strategy.scope() if page == "muon" else contextlib.nullcontext():
            exec(compile(code(page), f"{page}.md", "exec"), names)
        found[page] = globals()[f"run_{page}"](names)
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()

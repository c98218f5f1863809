"""Text for the language models: the data, its batches, and the measure of a model."""

from __future__ import annotations

import gzip
import hashlib
import math
import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

SEQUENCE = 64

# The characters of a text; all other characters are removed.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
_PACKAGES = [
    *("asyncio", "collections", "concurrent/futures", "email", "http", "importlib", "json"),
    *("logging", "multiprocessing", "unittest", "urllib", "xml/etree"),
]
_DOCUMENT_CHARACTERS = 5_000  # of each file, so that a few long files do not dominate the text
_HELD_OUT_CHARACTERS = 20_000


def load(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """A text as indices into `ALPHABET`: training text and held-out text.

    Args:
        path: Your own file, which may be compressed by gzip. Its last tenth (at most 20,000
            characters) is held out. Without it, the text comes with Python: the topics of `help()`
            and the source of the standard library, 1.5 million characters. Other versions of Python
            differ.
    """
    if path is not None:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", errors="ignore") as file:
            text = _codes(file.read())
        held_out = min(_HELD_OUT_CHARACTERS, len(text) // 10)
        return text[:-held_out], text[-held_out:]
    documents = _python_documents()
    # An order that mixes prose with source, and is the same on every machine.
    names = sorted(documents, key=lambda name: hashlib.md5(name.encode()).hexdigest())
    texts = [_codes(documents[name])[:_DOCUMENT_CHARACTERS] for name in names]
    held_out: list[np.ndarray] = []
    while sum(map(len, held_out)) < _HELD_OUT_CHARACTERS:
        held_out.append(texts.pop())
    return np.concatenate(texts), np.concatenate(held_out)


def _python_documents() -> dict[str, str]:
    library = Path(sysconfig.get_path("stdlib"))
    documents = {f"topics/{name}": text for name, text in pydoc_data.topics.topics.items()}
    for package in (".", *_PACKAGES):
        for file in (library / package).glob("*.py"):
            documents[str(file.relative_to(library))] = file.read_text(errors="ignore")
    return documents


def _codes(text: str) -> np.ndarray:
    text = re.sub(f"[^{re.escape(ALPHABET)}]", "", text)
    table = np.zeros(128, np.int32)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return table[np.frombuffer(text.encode("ascii"), np.uint8)]


def sequences(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the text into sequences, each with the sequence one character later as its labels."""
    count = (len(text) - 1) // SEQUENCE
    inputs = text[: count * SEQUENCE].reshape(count, SEQUENCE)
    labels = text[1 : count * SEQUENCE + 1].reshape(count, SEQUENCE)
    return inputs, labels


def shuffled(text: np.ndarray, batch_size: int, seed: int) -> tf.data.Dataset:
    """Endless batches, in an order that all workers share."""
    inputs, labels = sequences(text)
    return (
        tf.data.Dataset.from_tensor_slices((inputs, labels))
        .shuffle(len(inputs), seed=seed)
        .repeat()
        .batch(batch_size, drop_remainder=True)
    )


def in_order(text: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """All batches once, for validation."""
    return tf.data.Dataset.from_tensor_slices(sequences(text)).batch(batch_size)


def bits_per_character(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the bits of each character; the perplexity is 2 to the power of their mean."""
    nats = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return nats / math.log(2)

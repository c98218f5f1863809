"""The steps of TensorFlow's tutorial "Multi-worker training with Keras", on two workers.

https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras

The program below makes the tutorial's calls in the tutorial's order and with its numbers. What
differs: the strategy's name, the optimizer, which is wrapped, the data (scikit-learn's digits,
enlarged to MNIST's size), and what Keras 3 itself asks for:

- a saved model's path ends in `.keras`;
- `BackupAndRestore` is `gc.callbacks.BackupAndRestore`. Keras' own lets all workers write to one
  folder, and they run into each other there.
"""

from tests.workers import results, run_workers

PROGRAM = """
import json, os, sys, time
import numpy as np
import sklearn.datasets
import tensorflow as tf
import tf_gradcomp as gc

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])
report = {}


def dataset(batch_size):
    digits = sklearn.datasets.load_digits()
    images = np.pad(np.kron(digits.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) / 16
    examples = (images.astype(np.float32), digits.target.astype(np.int64))
    return tf.data.Dataset.from_tensor_slices(examples).shuffle(60000).repeat().batch(batch_size)


def compiled_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(input_shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = gc.CompressedOptimizer(tf.keras.optimizers.SGD(learning_rate=0.001))
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=optimizer,
        metrics=["accuracy"],
    )
    return model


def fit(name, model, *args, **kwargs):
    history = model.fit(*args, verbose=2, **kwargs).history
    report[name] = {measure: history[measure] for measure in ("loss", "accuracy")}


# "Train the model"
num_workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
strategy = gc.MultiWorkerMirroredStrategy()
global_dataset = dataset(64 * num_workers)
with strategy.scope():
    model = compiled_model()
fit("train", model, global_dataset, epochs=3, steps_per_epoch=STEPS)

# "Dataset sharding"
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
fit("sharding off", model, dataset(64).with_options(options), epochs=1, steps_per_epoch=5)

# "Model saving and loading"
task_id = strategy.cluster_resolver.task_id
is_chief = strategy.cluster_resolver.task_type == "worker" and task_id == 0


def path_to_write(path):
    if is_chief:
        return path
    folder = os.path.join(os.path.dirname(path), "workertemp_" + str(task_id))
    tf.io.gfile.makedirs(folder)
    return os.path.join(folder, os.path.basename(path))


model_path = os.path.join(FOLDER, "keras-model.keras")
model.save(path_to_write(model_path))
if is_chief:
    loaded = tf.keras.models.load_model(model_path)
    fit("load", loaded, dataset(64), epochs=2, steps_per_epoch=20)
else:
    tf.io.gfile.rmtree(os.path.dirname(path_to_write(model_path)))

# "Checkpoint saving and restoring"
checkpoint_folder = os.path.join(FOLDER, "ckpt")
checkpoint = tf.train.Checkpoint(model=model)
written = path_to_write(checkpoint_folder)
manager = tf.train.CheckpointManager(checkpoint, directory=written, max_to_keep=1)
manager.save()
if not is_chief:
    tf.io.gfile.rmtree(written)
while tf.train.latest_checkpoint(checkpoint_folder) is None:
    time.sleep(0.1)  # for the chief to have saved: a notebook's cells come one after another
checkpoint.restore(tf.train.latest_checkpoint(checkpoint_folder))
fit("restore", model, global_dataset, epochs=2, steps_per_epoch=20)

# "BackupAndRestore callback"
callbacks = [gc.callbacks.BackupAndRestore(backup_dir=os.path.join(FOLDER, "backup"))]
with strategy.scope():
    model = compiled_model()
fit("backup", model, global_dataset, epochs=3, steps_per_epoch=STEPS, callbacks=callbacks)

with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
    json.dump(report, file)
"""


def test_the_tutorial_runs(tmp_path):
    chief, other = results(run_workers(PROGRAM, args=[tmp_path, 25]))
    loaded = chief.pop("load")
    assert chief == other
    assert set(chief) == {"train", "sharding off", "restore", "backup"}
    for name in ("train", "backup"):
        losses = chief[name]["loss"]
        assert losses == sorted(losses, reverse=True)
    for later in (loaded, chief["restore"]):  # both resume where the training had ended
        assert later["accuracy"][-1] > chief["train"]["accuracy"][1]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"keras-model.keras", "ckpt", "workertemp_1", "worker-1"} & names

"""A process that dies at any stage of a save leaves the last complete save, or the new one."""

import contextlib
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp import whole_files


class Killed(BaseException):
    """The answer of the file system to a process that is as good as dead."""


class Stages:
    """Has the process die before its n-th change of files, after which it changes none."""

    def __init__(self, monkeypatch):
        self.left = None
        os_calls = [(os, name) for name in ("link", "remove", "rename", "replace", "unlink")]
        for owner, name in [*os_calls, (shutil, "rmtree")]:
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, original):
        def change(*args, **kwargs):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise Killed
            return original(*args, **kwargs)

        return change

    @contextlib.contextmanager
    def die_after(self, changes):
        self.left = changes
        try:
            yield
        except Killed:
            pass
        finally:
            self.left = None


def new_model():
    layers = [keras.layers.Dense(3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(gc.CompressedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def filled(model, number):
    for variable in variables(model):
        variable.assign(np.full(variable.shape, number))
    return model


def variables(model):
    momentums = model.optimizer.inner_optimizer.variables[2:]
    assert len(momentums) == len(model.variables) == 4
    return [*model.variables, *momentums]


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def load_into(load):
    def loaded(path):
        load(model := filled(new_model(), -1), path)
        return model

    return loaded


SHARD = 1.1e-7  # in GB: 118 bytes
FORMATS = {
    "m.keras": (lambda model, path: model.save(path), keras.models.load_model),
    "folder": (lambda model, path: model.save(path, zipped=False), keras.models.load_model),
    "m.weights.h5": (
        lambda model, path: model.save_weights(path),
        load_into(lambda model, path: model.load_weights(path)),
    ),
    "checkpoint": (
        lambda model, path: checkpoint(model).write(path),
        load_into(lambda model, path: checkpoint(model).read(path)),
    ),
    "m.weights.json": (
        lambda model, path: model.save_weights(path, max_shard_size=SHARD),
        load_into(lambda model, path: model.load_weights(path)),
    ),
}


def check_all_stages(stages, save, load):
    """Checks that a save which dies leaves the last complete one, or the new one."""
    save(1)
    readable, number = 1, 1
    while True:
        number += 1
        with stages.die_after(number - 2):
            save(number)
            break
        loaded = load()
        assert loaded in (readable, number)
        assert number > 2 or loaded == 1
        readable = loaded
    assert load() == number > 2
    save(number)


@pytest.mark.filterwarnings("error:.*[Ss]kipping:UserWarning")
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_the_last_complete_save_is_read_whenever_the_writer_dies(tmp_path, monkeypatch, name):
    save, load = FORMATS[name]
    path, model = str(tmp_path / name), new_model()

    def loaded():
        (value,) = {float(x) for v in variables(load(path)) for x in np.ravel(v)}
        return value

    check_all_stages(Stages(monkeypatch), lambda n: save(filled(model, n), path), loaded)
    assert not list(tmp_path.glob(".*"))


def test_the_latest_checkpoint_is_complete_whenever_the_writer_dies(tmp_path, monkeypatch):
    stages, value = Stages(monkeypatch), tf.Variable(0.0)
    saved = gc_checkpoint(value)
    manager = tf.train.CheckpointManager(saved, str(tmp_path), max_to_keep=1)

    def save(number):
        value.assign(number)
        manager.save()

    def load():
        value.assign(-1.0)
        saved.read(tf.train.latest_checkpoint(tmp_path))
        return value.numpy()

    check_all_stages(stages, save, load)


def gc_checkpoint(value):
    """Returns a checkpoint with the exchange of an optimizer, which is replaced as a whole."""
    model = new_model()
    return tf.train.Checkpoint(value=value, optimizer=model.optimizer)


def test_other_files_in_a_replaced_folder_stay(tmp_path):
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with whole_files.replacing_path(str(path)) as new:
            os.makedirs(f"{new}/inner")
            for name in ("file", "inner/file"):
                with open(f"{new}/{name}", "w") as file:
                    file.write(content)
            if content == "new":  # next to the old save, and as late as possible
                (path / "logs").mkdir()
                (path / "logs/events").write_text("other")
                (path / "inner/other").write_text("other")
                (path / "link").symlink_to("file")
    found = {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}
    other = dict.fromkeys(("logs/events", "inner/other"), "other")
    assert found == {"file": "new", "inner/file": "new", "link": "new", **other}
    assert os.listdir(tmp_path) == ["folder"]


def test_folders_are_synced_as_their_files(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(whole_files, "_sync", lambda path: synced.append(os.path.basename(path)))
    with whole_files.replacing_path(str(tmp_path / "folder")) as new:
        os.makedirs(f"{new}/inner")
        with open(f"{new}/inner/file", "w"):
            pass
    assert set(synced) == {"inner", "file"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_save_writes_to_no_file_of_a_link_that_another_user_has_left(tmp_path, name):
    """Neither under the name that saves once had, nor under that of the save before."""
    save, load = FORMATS[name]
    victims, path = tmp_path / "victims", tmp_path / "shared" / name
    path.parent.mkdir()
    victims.mkdir()
    (victims / "file").write_text("precious")
    seen = set()

    def links(*names):
        for one in names:
            target = victims / "file" if name.startswith("m.") else victims
            (path.parent / one).symlink_to(target)

    links(f".{name}.new")
    original = os.replace
    with pytest.MonkeyPatch.context() as patch:

        def replace(source, to):
            seen.update(left.name for left in path.parent.glob(".*"))
            return original(source, to)

        patch.setattr(os, "replace", replace)
        save(filled(new_model(), 1), str(path))
    assert (victims / "file").read_text() == "precious"
    (random,) = seen - {f".{name}.new"}
    links(random)
    save(filled(new_model(), 2), str(path))
    assert {float(x) for v in variables(load(str(path))) for x in np.ravel(v)} == {2}
    assert [file.name for file in victims.iterdir()] == ["file"]
    assert (victims / "file").read_text() == "precious"


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    path = tmp_path / "m.weights.h5"
    (tmp_path / "other").touch()
    new_model().save_weights(path)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    path.chmod(0o640)
    new_model().save_weights(path)
    assert path.stat().st_mode & 0o777 == 0o640

"""A process that dies at any stage of a save leaves the last complete save, or the new one."""

import contextlib
import os
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp import whole_files
from tf_gradcomp.strategy.checkpoint_files import replace_checkpoint


class Killed(BaseException):
    """The answer of the file system to a process that is as good as dead."""


class Stages:
    """Has the process die before its n-th change of files, after which it changes none."""

    def __init__(self, monkeypatch):
        self.left = None
        of_os = [(os, name) for name in ("link", "remove", "rename", "replace", "unlink")]
        for owner, name in [*of_os, (shutil, "rmtree"), (whole_files, "_exchange")]:
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
    assert load() == number > 3
    save(number)


@pytest.mark.filterwarnings("error:.*[Ss]kipping:UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_the_last_complete_save_is_read_whenever_the_writer_dies(tmp_path, monkeypatch, name):
    save, load = FORMATS[name]
    path, model = str(tmp_path / name), new_model()

    def loaded():
        (value,) = {float(x) for v in variables(load(path)) for x in np.ravel(v)}
        return value

    check_all_stages(Stages(monkeypatch), lambda n: save(filled(model, n), path), loaded)
    assert not list(tmp_path.glob(".*"))


class OneTensorEach(tf.train.experimental.ShardingCallback):
    """Splits so that no shard can be split any more; one tensor is in two slices."""

    description = "one tensor in each shard"

    def __call__(self, tensors):
        slices = tf.train.experimental.MaxShardSizePolicy(8)
        return [
            {key: {spec: x}}
            for one in slices(tensors)
            for key in one
            for spec, x in one[key].items()
        ]


def test_checkpoints_whose_shards_cannot_be_split_are_replaced(tmp_path, monkeypatch):
    path, value = str(tmp_path / "checkpoint"), tf.Variable([0.0] * 4)
    no_shard = tmp_path / "checkpoint.data-extra-of-model"
    no_shard.write_text("other")
    stages, saved = Stages(monkeypatch), tf.train.Checkpoint(value=value, two=tf.Variable(2.0))
    options = tf.train.CheckpointOptions(experimental_sharding_callback=OneTensorEach())

    def save(number):
        value.assign([number] * 4)
        replace_checkpoint(path, options, lambda to, chosen: saved.write(to, options=chosen))

    def load():
        value.assign([-1.0] * 4)
        saved.read(path).assert_consumed()
        return len(set(value.numpy())) == 1 and value.numpy()[0]

    check_all_stages(stages, save, load)
    number = len(list(tmp_path.glob("checkpoint.data-0*")))
    save(1)
    assert len(list(tmp_path.glob("checkpoint.data-0*"))) != number
    assert load() == 1
    assert no_shard.read_text() == "other"


def test_a_save_of_shards_removes_no_other_file(tmp_path):
    """Not files with names like shards, nor shards of a list that this one is a copy of."""
    model, path = filled(new_model(), 1), tmp_path / "m.weights.json"
    others = [tmp_path / f"m_{name}.weights.h5" for name in ("final", "best1", "00000", "00002")]

    def values(path):
        return FORMATS["m.weights.json"][1](path).get_weights()

    for other in others:
        model.save_weights(other)
    content = [other.read_bytes() for other in others]
    model.save_weights(path, max_shard_size=SHARD)
    copied = shutil.copy(path, tmp_path / "copy.weights.json")
    filled(model, 2).save_weights(copied, max_shard_size=SHARD)
    assert all((value == 1).all() for value in values(path))
    shards = set(tmp_path.glob("m_*"))
    for number in (3, 4):
        filled(model, number).save_weights(path, max_shard_size=SHARD)
        assert all((value == number).all() for value in values(path))
        assert len(set(tmp_path.glob("m_*"))) == len(shards)
    assert all((value == 2).all() for value in values(copied))
    assert [other.read_bytes() for other in others] == content


def test_shards_that_need_more_room_than_the_disk_has_are_not_begun(tmp_path, monkeypatch):
    """HDF5 would end the process."""
    model, path = filled(new_model(), 1), tmp_path / "m.weights.json"
    model.save_weights(path, max_shard_size=SHARD)
    content = {file: file.read_bytes() for file in tmp_path.iterdir()}
    size = sum(np.asarray(one).nbytes for one in [*model.variables, *model.optimizer.variables])
    room = types.SimpleNamespace(free=size)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    filled(model, 2).save_weights(path, max_shard_size=SHARD)
    after = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert after != content
    room.free -= 1
    with pytest.raises(OSError, match=f"No space left on device, where {size:,} bytes"):
        filled(model, 3).save_weights(path, max_shard_size=SHARD)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == after


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


def write(path, content):
    with whole_files.replacing_path(str(path)) as new:
        os.makedirs(new)
        with open(f"{new}/file", "w") as file:
            file.write(content)


def refuse(monkeypatch, name):
    def refused(*args, **kwargs):
        raise PermissionError("refused")

    monkeypatch.setattr(os, name, refused)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("exchange", ["at once", "refused", "missing"])
def test_folders_are_replaced_on_any_file_system(tmp_path, monkeypatch, links, exchange):
    if exchange == "refused":
        monkeypatch.setattr(whole_files, "_EXCHANGE", 2**31 - 1)
    elif exchange == "missing":  # as in an old glibc
        monkeypatch.setattr(whole_files.ctypes, "CDLL", lambda *_, **__: object())
    if not links:
        refuse(monkeypatch, "link")
    path, others = tmp_path / "folder", ["folder.new", "folder.old"]
    for name in others:
        (tmp_path / name).mkdir()
    write(path, "1")
    (path / "logs").mkdir()
    (path / "link").symlink_to("nothing")
    with open(path / "logs/events", "w") as events:
        for content in ("2", "3"):
            write(path, content)
            print(content, file=events, flush=True)
            assert (path / "file").read_text() == content
    assert (path / "logs/events").read_text() == "2\n3\n"
    assert os.readlink(path / "link") == "nothing"
    assert sorted(os.listdir(tmp_path)) == ["folder", *others]


def test_a_complete_folder_exists_at_any_stage_without_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_files, "_EXCHANGE", 2**31 - 1)
    path, stages = tmp_path / "folder", Stages(monkeypatch)
    write(path, readable := "1")
    for number in range(2, 20):
        with stages.die_after(number - 2):
            write(path, str(number))
            break
        found = path if path.exists() else tmp_path / "folder.old"
        content = (found / "file").read_text()
        assert content in (readable, str(number))
        readable = content
    assert (path / "file").read_text() == str(number)
    assert 5 < number < 19


def test_a_folder_that_cannot_be_replaced_stays_and_nothing_is_lost(tmp_path, monkeypatch):
    path = tmp_path / "folder"
    write(path, "1")
    (tmp_path / "folder.new").mkdir()
    (path / "other").write_text("other")
    refuse(monkeypatch, "link")
    monkeypatch.setattr(shutil, "copyfile", os.link)
    with pytest.raises(PermissionError, match="refused") as error:
        write(path, "2")
    assert error.value.__notes__ == [whole_files._NEW_KEPT % f"{path}.new.2"]
    assert (path / "file").read_text() == "1"
    assert (tmp_path / "folder.new.2/file").read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["folder", "folder.new", "folder.new.2"]


def test_folders_are_synced_as_their_files(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(whole_files, "_sync", lambda path: synced.append(os.path.basename(path)))
    with whole_files.replacing_path(str(tmp_path / "folder")) as new:
        os.makedirs(f"{new}/inner")
        with open(f"{new}/inner/file", "w"):
            pass
    assert {"folder", "inner", "file", tmp_path.name} <= set(synced)


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
            target = victims / "file" if name == "m.keras" else victims
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

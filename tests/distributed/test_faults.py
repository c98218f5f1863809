"""Bad gradients, workers that disagree, and workers that die: nobody hangs, nothing is lost."""

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close
from tests.workers import Job, result, run_workers
from tf_gradcomp import compressors

PROGRAMS = Path(__file__).parent / "programs"
BAD_STEP = 2
SETTINGS = {
    "optimizer": [
        "plain",
        "mixed_float16",
        "loss scaler around",
        "loss scaler inside",
        "accumulation",
    ],
    "strategy": ["plain", "mixed_float16"],
}
CASES = [(way, setting) for way, settings in SETTINGS.items() for setting in settings]
SCALED = [case for case in CASES if case[1] not in ("plain", "accumulation")]
# The gradient of worker 1 is bad, and worker 0's gradient goes into the exchange.
KEPT = [case for case in CASES if case != ("strategy", "mixed_float16")]


@pytest.fixture(scope="module")
def steps_of():
    """Returns the state after each step, by way and setting, on each worker."""
    seen = {}
    for way in SETTINGS:
        for worker in run_workers(PROGRAMS / "faults.py", 2, [way]):
            for setting in SETTINGS[way]:
                seen.setdefault((way, setting), []).append(result(worker)[setting])
    return seen


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_all_skip_a_step_whose_gradient_is_bad_on_one(steps_of, case):
    before, after = around_the_bad_step(case)
    for worker in steps_of[case]:
        if case != ("strategy", "plain"):  # there, the optimizer is given zeros
            assert worker[after]["weights"] == worker[before]["weights"]
        counted = case == ("strategy", "plain")
        assert worker[after]["iterations"] == worker[before]["iterations"] + counted
        assert worker[-1]["weights"] != worker[after]["weights"]
        assert worker[-1]["iterations"] > worker[after]["iterations"]


@pytest.mark.parametrize("case", KEPT, ids=" ".join)
def test_skipped_steps_are_counted(steps_of, case):
    before, after = around_the_bad_step(case)
    for worker in steps_of[case]:
        assert worker[before]["skipped"] == 0
        assert [step["skipped"] for step in worker[after:]] == [1] * len(worker[after:])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_weights_stay_finite_and_bit_equal(steps_of, case):
    for first, second in zip(*steps_of[case], strict=True):
        assert first["finite"]
        assert first["weights"] == second["weights"]
        assert first["slots"] == second["slots"]


@pytest.mark.parametrize("case", SCALED, ids=" ".join)
def test_loss_scale_is_halved_on_all_workers(steps_of, case):
    before, after = around_the_bad_step(case)
    scales = [[step["scale"] for step in worker] for worker in steps_of[case]]
    assert scales[0] == scales[1]
    assert scales[0][after] == scales[0][before] / 2
    assert scales[0][-1] == scales[0][after]


@pytest.mark.parametrize("case", KEPT, ids=" ".join)
def test_finite_gradient_is_kept_and_bad_one_is_dropped(steps_of, case):
    before, after = around_the_bad_step(case)
    finite, bad = steps_of[case]
    changes = [change_of_residual(worker[before], worker[after]) for worker in (finite, bad)]
    assert changes[0] > 1e-3
    assert changes[1] < 1e-6


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_residuals_stay_finite(steps_of, case):
    for worker in steps_of[case]:
        for step in worker:
            assert all(np.all(np.isfinite(r)) for r in step["residual sums"])


def around_the_bad_step(case):
    """The last step before, and the first after which the bad gradient has come to the exchange."""
    if case[1] == "accumulation":  # over two steps, so it comes with the second
        return BAD_STEP, BAD_STEP + 1
    return BAD_STEP - 1, BAD_STEP


def change_of_residual(before, after):
    return max(
        np.abs(np.subtract(a, b)).max()
        for a, b in zip(after["residuals"], before["residuals"], strict=True)
    )


@pytest.fixture(scope="module")
def mismatches():
    return [result(worker) for worker in run_workers(PROGRAMS / "mismatch.py", 2, ["models"])]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("more layers", "creating variable"),
        ("fewer layers", "creating variable"),
        ("classes", "(8, 4)"),
        ("inner optimizer", "inner optimizer's class: worker 0 has '\"Adam\"'"),
        ("clipping", "inner optimizer's clipnorm: worker 0 has '2.0', worker 1 has '1.0'"),
        ("reduction", "reduction: worker 0 has 'sum', worker 1 has 'mean'"),
        ("wrapped", "creating variable"),
        ("policy", "max_dense_elements"),
        ("rows", "number of batches (for data of unequal sizes: dataset.repeat()"),
        ("rows for validation", "number of batches"),
        ("call", "next action: worker 0 has 'fit', worker 1 has 'evaluate'; number of batches"),
        ("steps", "worker 0 has 1, worker 1 has 2"),
        *((method, "compressor") for method in compressors.names()),
    ],
)
def test_every_worker_reports_the_difference_in(mismatches, what, named):
    for worker in mismatches:
        assert worker[what]["error"] == "WorkersDisagreeError"
        assert named in worker[what]["text"]
        assert "worker 0 has" in worker[what]["text"]
        assert "worker 1 has" in worker[what]["text"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("versions", ["keras: "]),
        (
            "settings of the strategy",
            ["compressor of the strategy: ", "two_level: worker 0 has True"],
        ),
        ("replicas of each", ["replicas in a worker: worker 0 has 2, worker 1 has 1"]),
    ],
)
def test_every_worker_ends_when_they_differ_in(what, named):
    for worker in run_workers(PROGRAMS / "mismatch.py", 2, [what], check=False):
        assert worker.returncode == 1
        last = worker.stderr.rstrip().splitlines()[-1]
        assert "WorkersDisagreeError" in last
        assert all(name in last for name in named)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Runs two workers, one of which is killed after its second epoch; returns the backup and the
    survivor."""
    folder = tmp_path_factory.mktemp("backup")
    with Job(PROGRAMS / "resume.py", 2, [folder / "backup", 1000]) as job:
        job.wait_for_line(1, "epoch 1 ended", timeout=300)
        job.kill(1)
        killed = time.monotonic()
        survivor = job.wait()[0]
        seconds = time.monotonic() - killed
    print(f"the survivor ended {seconds:.1f} s after the other was killed")
    return folder / "backup", survivor


def test_survivor_of_a_killed_worker_ends_with_a_named_error(killed):
    _, survivor = killed
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


# Trains with ScaleCom; worker 1 kills itself when it is to broadcast, in its second turn.
_LEADER_DIES = '''
    import os
    import signal

    import keras
    import tensorflow as tf
    from tests.distributed.programs.common import Setup, dense_model, digits

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
'''


@pytest.mark.oldest
def test_no_worker_hangs_after_a_leader_dies_before_its_broadcast():
    survivor, leader = run_workers(_LEADER_DIES, 2, check=False)
    assert leader.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


# Trains in rounds of four local steps; worker 1 kills itself after the sixth step.
_DIES_IN_ROUND = '''
    import os
    import signal

    import keras
    from tests.distributed.programs.common import Setup, dense_model, digits

    from tests.ranks import RANK

    DEATH = 6


    class Die(keras.callbacks.Callback):
        """Kills worker 1 within its second round."""

        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == DEATH and RANK == 1:
                assert self.model.optimizer.rounds.pending
                os.kill(os.getpid(), signal.SIGKILL)


    setup = Setup("optimizer", "no_compression")
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1), local_steps=4))
    model.fit(*digits(320), batch_size=32, verbose=0, callbacks=[Die()])
'''


def test_no_worker_hangs_after_another_dies_within_a_round():
    survivor, other = run_workers(_DIES_IN_ROUND, 2, check=False)
    assert other.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


@pytest.mark.parametrize("workers", [3, 1])
def test_killed_job_resumes_with(killed, tmp_path, workers):
    backup, _ = killed
    saved, epochs_done = read_backup(backup)
    copy = tmp_path / "backup"
    copy.mkdir()
    for file in backup.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    args = [copy, epochs_done + 2]
    resumed = [result(w) for w in run_workers(PROGRAMS / "resume.py", workers, args)]
    for worker in resumed:
        assert worker["epochs"] == [epochs_done, epochs_done + 1]
        assert worker["weights"] == resumed[0]["weights"]
        assert worker["iterations"] == 4 * (epochs_done + 2)
        assert worker["restored"]["weights"] == resumed[0]["restored"]["weights"]
        for what, sums in saved.items():
            for restored, before in zip(worker["restored"][what], sums, strict=True):
                assert_close(restored, before, terms=4)
        residuals = worker["after first step"]
        assert (max(residuals) == 0) == (workers == 1)  # one replica applies it at once
        # And Adam gets its second moment back.
        assert all(np.any(v) == (workers == 1) for v in worker["own second moments"])


def read_backup(folder):
    """The sums over the replicas, by name, and the number of epochs in Keras' files."""
    h5py = pytest.importorskip("h5py")
    metadata = json.loads((folder / "training_metadata.json").read_text())
    with h5py.File(folder / "latest.weights.h5") as file:
        group = file["optimizer/vars"]
        saved = {
            what: [np.asarray(group[name]) for name in sorted(group) if re.fullmatch(pattern, name)]
            for what, pattern in (
                ("residual sums", r"residual_\d+"),
                ("second moments", r"second_moment_\d+"),
            )
        }
    for sums in saved.values():
        assert max(np.abs(total).max() for total in sums) > 0
    return saved, metadata["epoch"]

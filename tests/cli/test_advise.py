"""`gradcomp advise` as a user starts it."""

import json
import re

import pytest

from tests.cli.test_run import gradcomp, preloaded_gradcomp, program  # noqa: F401

MODEL = """
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(30), keras.layers.Dense(2)])
        optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(), "top_k(density=0.25)")
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
    x, y = np.zeros((400, 8), "float32"), np.zeros((400, 2), "float32")
"""
FIT = 'model.fit(x, y, batch_size=10, epochs=2, verbose=0)\nprint("trained to the end")\n'
LOOP = """
    @tf.function
    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y)) / strategy.num_replicas_in_sync
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        strategy.run(on_replica)

    for i in range(40):
        print("step", i, flush=True)
        step()
    print("trained to the end")
"""


def columns(table, method):
    """The milliseconds, the times faster, the bytes, and whether it trains like uncompressed."""
    (row,) = [line for line in table.splitlines() if line.startswith(f"{method} ")]
    match = re.fullmatch(
        r"\S+ +([\d.,]+)(?: ± [\d.]+)? +([\d.]+) +([\d.,]+ [kM]?B) +(yes|no|not tried)", row
    )
    return match.groups()


def test_the_first_steps_are_measured_and_the_program_ends(program):  # noqa: F811
    done = preloaded_gradcomp("advise", "-n", "2", program(_joined(MODEL, FIT)))
    assert done.returncode == 0, done.stderr
    assert "trained to the end" not in done.stdout
    verdict, *_ = done.stdout.splitlines()
    assert verdict.startswith(("Use compressor=", "Compression will not pay", "Not decided"))
    assert "over this machine's loopback: on your network, the gain will differ" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 78
    for method in ("no_compression", "cast", "adacomp", "top_k(density=0.25)"):
        milliseconds, _, _, like_uncompressed = columns(done.stdout, method)
        assert float(milliseconds) > 0
        expected = "not tried" if method.startswith("top_k") else "yes"  # the program's own
        assert like_uncompressed == expected
    assert "encode" not in done.stdout
    assert "gradcomp advise -H host1,host2" in done.stdout.splitlines()[-1]


def test_figures_found_in_a_loop_can_be_read_by_a_program(program):  # noqa: F811
    path = program("print('from the program')\n" + _joined(MODEL, LOOP))
    done = preloaded_gradcomp("advise", "-n", "2", "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "from the program" in done.stderr
    assert "trained to the end" not in done.stderr
    steps = {one["method"]: one["step"] for one in found["predictions"]}
    assert found["best"] in (min(steps, key=steps.get), "no_compression")
    (local,) = (method for method in steps if method.startswith("top_k"))  # the program's own
    assert all(one["compute"] > 0 for one in found["predictions"])
    like_dense = {one["method"]: one["trains_like_dense"] for one in found["predictions"]}
    assert like_dense == {"no_compression": True, "cast": True, "adacomp": True, local: None}


def test_several_replicas_of_a_worker_count_a_step_once(program):  # noqa: F811
    two = "from tf_gradcomp.private.tensorflow import use_logical_cpus\nuse_logical_cpus(2)\n"
    model = MODEL.replace("Strategy()", "Strategy(two_level=False)")
    path = program(_joined(two, model, LOOP))
    done = preloaded_gradcomp("advise", "-n", "1", "--json", path)
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stderr.splitlines() if "step " in line]
    assert len(steps) in (13, 14)  # the program may begin one more before it is ended


def test_a_program_that_is_too_short_gets_an_error(program):  # noqa: F811
    short = "model.fit(x, y, batch_size=100, verbose=0)"
    done = preloaded_gradcomp("advise", "-n", "2", program(_joined(MODEL, short)))
    assert done.returncode == 1
    assert "it must train for at least 13 steps, with gc.CompressedOptimizer" in done.stderr


def test_a_compressor_on_the_strategy_is_refused_at_once(program):  # noqa: F811
    path = program("""
        import tf_gradcomp as gc
        gc.MultiWorkerMirroredStrategy(compressor="adacomp")
        print("too late")
    """)
    done = preloaded_gradcomp("advise", "-n", "2", path)
    assert done.returncode == 1
    assert "too late" not in done.stdout
    assert "Here the compressor is on the strategy: for this run, create" in done.stderr


def test_one_worker_has_nothing_to_exchange(program):  # noqa: F811
    done = preloaded_gradcomp("advise", "-n", "1", program(_joined(MODEL, FIT)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Compression will not pay: one worker exchanges nothing.\n")


def test_details_are_printed_on_request(program):  # noqa: F811
    path = program("""
        import json
        advice = {"verdict": "V " * 50, "table": "T", "details": "encode D", "best": "cast"}
        if index == 0:
            json.dump(advice, open(os.environ["GRADCOMP_ADVISE"], "w"))  # tf_gradcomp
    """)
    lines = gradcomp("advise", "-n", "2", "--details", path).stdout.splitlines()
    assert max(map(len, lines[:2])) <= 78
    assert "encode D" in lines
    assert "encode D" not in gradcomp("advise", "-n", "2", path).stdout


def test_an_optimizer_without_wrapper_is_refused_before_it_trains(program):  # noqa: F811
    model = MODEL.replace(
        'gc.CompressedOptimizer(keras.optimizers.Adam(), "top_k(density=0.25)")',
        "keras.optimizers.Adam()",
    )
    done = preloaded_gradcomp("advise", "-n", "2", program(_joined(model, FIT)))
    assert done.returncode == 1
    assert "trained to the end" not in done.stdout
    assert "compile it with optimizer=gc.CompressedOptimizer(...)" in done.stderr


def test_a_program_that_does_not_mention_the_package_gets_a_warning_at_once(program):  # noqa: F811
    done = gradcomp("advise", "-n", "2", program("print('no wrapper')"))
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert "does not mention tf_gradcomp" in first
    mentions = gradcomp("advise", "-n", "2", program("import json  # tf_gradcomp"))
    assert "does not mention" not in mentions.stderr


def test_a_program_that_fails_is_reported(program):  # noqa: F811
    done = gradcomp("advise", "-n", "2", program("raise ValueError('no such file')"))
    assert done.returncode == 1
    assert "all workers died with the same error" in done.stderr
    assert "ValueError: no such file" in done.stderr


def test_it_joins_a_job_as_one_of_its_workers(program):  # noqa: F811
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    path = program("print(index, os.environ['GRADCOMP_ADVISE'] != '')")
    for index, code in ((0, 1), (1, 0)):  # only the chief reports the missing measurement
        job = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        done = gradcomp("advise", path, env={"TF_CONFIG": job})
        assert done.returncode == code
        assert done.stdout == ("" if index else "[worker 0] 0 True\n")


def test_output_of_workers_is_not_in_the_json(program):  # noqa: F811
    path = program(
        "print('hello'); open(os.environ['GRADCOMP_ADVISE'], 'w').write('{}')  # tf_gradcomp"
    )
    job = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    done = gradcomp("advise", "--json", path, env={"TF_CONFIG": job})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{}\n"
    assert "[worker 0] hello" in done.stderr


def test_a_worker_of_a_job_that_is_killed_is_reported(program):  # noqa: F811
    job = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    path = program("os.kill(os.getpid(), 9)")
    done = gradcomp("advise", path, env={"TF_CONFIG": job})
    assert done.returncode == 137
    assert "killed by SIGKILL" in done.stderr


def test_a_process_that_does_not_train_is_refused(program):  # noqa: F811
    cluster = {"worker": ["a:1"], "evaluator": ["a:2"]}
    job = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    done = gradcomp("advise", program(""), env={"TF_CONFIG": job})
    assert done.returncode == 2
    assert "does not train" in done.stderr


@pytest.mark.parametrize("args", [[], ["-n", "2"]])
def test_workers_are_either_started_or_there(program, args):  # noqa: F811
    job = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    env = {"TF_CONFIG": job} if args else {}
    done = gradcomp("advise", *args, program(""), env=env)
    assert done.returncode == 2
    says = "TF_CONFIG is set" if args else "Say how many workers to start"
    assert says in done.stderr


def test_workers_behind_the_program_are_the_programs_own(program):  # noqa: F811
    done = gradcomp("advise", program(""), "-n", "2")
    assert done.returncode == 2
    assert "-H host1,host2). Put -n before the program." in " ".join(done.stderr.split())


def _joined(*sources):
    import textwrap

    return "\n".join(textwrap.dedent(source) for source in sources)

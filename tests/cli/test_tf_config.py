import json

import pytest

from tf_gradcomp.tf_config import TFConfig, make_tf_config, read_tf_config

pytestmark = pytest.mark.quick

CLUSTER = {"worker": ["host1:2222", "host2:2222"]}
TASK = {"type": "worker", "index": 1}


def read(config):
    text = config if isinstance(config, str) else json.dumps(config)
    return read_tf_config({"TF_CONFIG": text})


def test_unset_is_none():
    assert read_tf_config({}) is None


def test_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": TASK}))
    assert read_tf_config() == TFConfig({"worker": ("host1:2222", "host2:2222")}, "worker", 1)


def test_ranks_count_the_chief_first():
    cluster = {"worker": ["c:1", "d:1"], "chief": ["a:1"], "ps": ["b:1"]}
    config = read({"cluster": cluster, "task": TASK})
    assert config.worker_addresses == ("a:1", "c:1", "d:1")
    assert (config.num_workers, config.rank, config.is_chief) == (3, 2, False)
    assert read({"cluster": cluster, "task": {"type": "chief", "index": 0}}).is_chief
    assert read({"cluster": cluster, "task": {"type": "ps", "index": 0}}).rank is None


def test_worker_0_is_chief_where_there_is_no_other():
    assert read({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}).is_chief


def test_settings_that_tensorflow_accepts_are_accepted():
    task = {"type": "evaluator", "index": "0", "trial": "1"}
    config = read({"cluster": CLUSTER, "task": task, "rpc_layer": "grpc", "environment": "cloud"})
    assert (config.task_type, config.task_index, config.rank) == ("evaluator", 0, None)
    addresses = ["10.0.0.1:1", "[::1]:65535", "a-b.c_d:80"]
    assert read({"cluster": {"worker": addresses}, "task": TASK}).num_workers == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "set but empty"),
        ("{'cluster': 1}", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ({}, 'needs a "cluster" object'),
        ({"cluster": ["a:1"], "task": TASK}, 'needs a "cluster" object'),
        ({"cluster": {}, "task": TASK}, 'needs a "cluster" object'),
        ({"cluster": CLUSTER}, 'needs a "task" object'),
        ({"cluster": CLUSTER, "task": {"type": "worker"}}, 'needs a "task" object'),
        ({"cluster": CLUSTER, "task": {"type": "boss", "index": 0}}, "task type 'boss'"),
        ({"cluster": CLUSTER, "task": {"type": ["worker"], "index": 0}}, "task type ['worker']"),
        ({"cluster": {"workers": ["a:1"]}, "task": TASK}, "task type 'workers'"),
        ({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}}, "the cluster has none"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}, "index 2 is out of range"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": -1}}, "index -1 is out of range"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 0.5}}, "a whole number"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": True}}, "a whole number"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": TASK}, "'a:1' twice"),
        ({"cluster": {"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "task": TASK}, "'a:1' twice"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": TASK}, "one chief only"),
        ({"cluster": {"worker": "a:1"}, "task": TASK}, 'list of addresses for "worker"'),
        ({"cluster": {"worker": []}, "task": TASK}, 'list of addresses for "worker"'),
        ({"cluster": {"worker": ["host1"]}, "task": TASK}, "Received: 'host1'"),
        ({"cluster": {"worker": ["host1:"]}, "task": TASK}, "Received: 'host1:'"),
        ({"cluster": {"worker": ["host1:0"]}, "task": TASK}, "Received: 'host1:0'"),
        ({"cluster": {"worker": ["host1:65536"]}, "task": TASK}, "Received: 'host1:65536'"),
        ({"cluster": {"worker": ["grpc://host1:1"]}, "task": TASK}, "Received: 'grpc://host1:1'"),
        ({"cluster": {"worker": [1]}, "task": TASK}, "Received: 1"),
    ],
)
def test_each_mistake_has_one_sentence(config, says):
    with pytest.raises(ValueError, match=r"^TF_CONFIG") as error:
        read(config)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_makes_what_it_reads():
    text = make_tf_config(["a:1", "b:2"], 1)
    assert read(text) == TFConfig({"worker": ("a:1", "b:2")}, "worker", 1)
    assert json.loads(text)["task"] == {"type": "worker", "index": 1}


@pytest.mark.parametrize(("addresses", "index"), [([], 0), (["a:1"], 1), (["a"], 0)])
def test_makes_nothing_wrong(addresses, index):
    with pytest.raises(ValueError, match="TF_CONFIG"):
        make_tf_config(addresses, index)

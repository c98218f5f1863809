"""Compares the page on clusters with their variables, and the image with its parts."""

import json
import re
from pathlib import Path

import pytest

from tests import pods
from tf_gradcomp.environment import HEARTBEAT_TIMEOUT
from tf_gradcomp.groups.stalls import heartbeat_timeout
from tf_gradcomp.tf_config import read_tf_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize(
    ("place", "workers", "rank", "first"),
    [
        ("Kubernetes", 2, 0, "train-worker-0.default.svc:2222"),
        ("Vertex AI", 3, 2, "training-workerpool0-0:2222"),
    ],
)
def test_a_cluster_s_tf_config_is_understood(place, workers, rank, first):
    section = PAGE.partition(f"\n## {place}\n")[2]
    text = re.search(r"```json\n(.*?)```", section, re.S)[1]
    config = read_tf_config({"TF_CONFIG": json.dumps(json.loads(text))})
    assert (config.num_workers, config.rank) == (workers, rank)
    assert config.worker_addresses[0] == first


MANIFESTS = {
    "tfjob.yaml": (pods.tfjob_environments, "train-worker-{}.default.svc:2222"),
    "trainjob.yaml": (
        pods.trainjob_environments,
        "train-node-0-{}.train:2222",
    ),  # as a JobSet names pods
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_s_pods_are_the_workers_of_one_job(manifest):
    read, name = MANIFESTS[manifest]
    _, environments = read(manifest)
    configs = [read_tf_config(env) for env in environments]
    assert [config.rank for config in configs] == [0, 1]
    for config in configs:
        assert config.worker_addresses == (name.format(0), name.format(1))


def test_the_page_shows_what_the_training_operator_sets():
    text = re.search(r"```json\n(.*?)```", PAGE.partition("\n## Kubernetes\n")[2], re.S)[1]
    assert json.loads(text) == json.loads(pods.tfjob_environments("tfjob.yaml")[1][0]["TF_CONFIG"])


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_pods_share_a_volume_and_a_timeout_and_are_restarted(manifest, monkeypatch):
    template, environments = MANIFESTS[manifest][0](manifest)
    objects = pods.objects(manifest)
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (container,), (volume,) = template["containers"], template["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    saves = f'# train.py gives fit gc.callbacks.BackupAndRestore("{mount["mountPath"]}/backup").'
    assert saves in (pods.MANIFESTS / manifest).read_text()
    (timeout,) = {env[HEARTBEAT_TIMEOUT] for env in environments}
    monkeypatch.setenv(HEARTBEAT_TIMEOUT, timeout)
    assert heartbeat_timeout(None) == float(timeout)
    if manifest == "tfjob.yaml":
        spec = objects["TFJob"]["spec"]
        assert spec["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
        assert spec["runPolicy"]["backoffLimit"] >= len(environments)  # one loss restarts all
    else:
        jobset = objects["TrainingRuntime"]["spec"]["template"]["spec"]
        assert jobset["failurePolicy"]["maxRestarts"] > 0
        # A pod that came back by itself would wait for others that have not ended.
        assert template["restartPolicy"] == "Never"
        assert jobset["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
        runtime = objects["TrainJob"]["spec"]["runtimeRef"]
        assert runtime["name"] == objects["TrainingRuntime"]["metadata"]["name"]


def test_the_image_is_made_of_what_is_there_and_as_the_docs_install():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
    installed = " ".join(" ".join(lines).split()).replace("--no-cache-dir ", "")
    for command in (
        'pip install "tensorflow-cpu>=2.17,<2.22"',
        "pip install .",
        "gradcomp info",
    ):
        assert command in installed
        assert command in (ROOT / "docs" / "install.md").read_text()

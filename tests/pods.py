"""Kubernetes without a cluster: what its manifests set, and pods that are started again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import yaml

from tests.workers import PYTHON, python_path, server
from tf_gradcomp.launch import JobResult, LocalJob
from tf_gradcomp.launch.resources import ReservedPorts

MANIFESTS = Path(__file__).parents[1] / "keras_examples" / "kubernetes"
HOSTS = "HOSTS"


def objects(manifest):
    """Returns the objects of a manifest, by kind."""
    documents = yaml.safe_load_all((MANIFESTS / manifest).read_text())
    return {document["kind"]: document for document in documents}


def tfjob_environments(manifest, namespace="default"):
    """Returns the pod template and each pod's environment, as the training operator makes them."""
    job = objects(manifest)["TFJob"]
    worker, name = job["spec"]["tfReplicaSpecs"]["Worker"], job["metadata"]["name"]
    (container,) = worker["template"]["spec"]["containers"]
    names = [f"{name}-worker-{i}.{namespace}.svc:2222" for i in range(worker["replicas"])]
    environments = []
    for index in range(worker["replicas"]):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": names}, "task": task, "environment": "cloud"}
        local = {one["name"]: one["value"] for one in container["env"]}
        environments.append({**local, "TF_CONFIG": json.dumps(config)})
    return worker["template"]["spec"], environments


def trainjob_environments(manifest):
    """Returns the pod template and each pod's environment, as Kubeflow Trainer makes them."""
    found = objects(manifest)
    (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]["spec"]
    (container,) = template["containers"]
    environments = []
    for index in range(found["TrainJob"]["spec"]["trainer"]["numNodes"]):
        local = {}
        for one in container["env"]:
            text = one.get("value", str(index))  # the only field that it refers to is the index
            for name, value in local.items():  # as the kubelet does
                text = text.replace(f"$({name})", value)
            local[one["name"]] = text
        environments.append(local)
    return template, environments


class Pod:
    """A container that is started again some seconds after it has failed, as the kubelet does.

    Args:
        command: The pod's command, without the interpreter.
        env: Its environment.
        backoff: The seconds from a failure to the next start.
    """

    def __init__(self, command: list[str], env: dict[str, str], backoff: float) -> None:
        self.ends: list[JobResult] = []
        self.output: list[str] = []
        self._command = [*PYTHON, *command]
        self._env = {**os.environ, "PYTHONPATH": python_path(), "PRELOADED": server(0), **env}
        self._backoff = backoff
        self._start_at = 0.0
        self._job: LocalJob | None = None

    @property
    def is_complete(self) -> bool:
        """True if it has ended without an error."""
        return self._job is None and bool(self.ends) and self.ends[-1].exit_code == 0

    def step(self) -> None:
        """Looks once at the container."""
        if self.is_complete:
            return
        if self._job is None:
            if time.monotonic() >= self._start_at:
                self._job = LocalJob(
                    self._command, 1, env=self._env, tf_config=False, on_line=self._note
                )
        elif not self._job.step():
            self.ends.append(self._job.run())
            self._job = None
            self._start_at = time.monotonic() + self._backoff

    def close(self) -> None:
        """Ends it."""
        if self._job is not None:
            self._job.close()

    def _note(self, _worker: int, _stream: str, line: str) -> None:
        self.output.append(line)


def on_own_ports(environments):
    """Returns the environments of pods that share a machine, and what keeps their ports free."""
    ports = ReservedPorts(["localhost"] * len(environments))
    values = [address.rpartition(":")[2] for address in ports.addresses]
    local = []
    for env in environments:
        config = json.loads(env["TF_CONFIG"])
        hosts = [address.partition(":")[0] for address in config["cluster"]["worker"]]
        config["cluster"]["worker"] = [f"{h}:{p}" for h, p in zip(hosts, values, strict=True)]
        local.append({**env, "TF_CONFIG": json.dumps(config)})
    return local, hosts, ports

"""Compares the page on clusters with their variables, and the image with its parts."""

import json
import re
from pathlib import Path

import pytest

from tf_gradcomp.tf_config import read_tf_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize(
    ("place", "workers", "rank", "first"),
    [
        ("Kubeflow", 2, 0, "train-worker-0.default.svc:2222"),
        ("Vertex AI", 3, 2, "training-workerpool0-0:2222"),
    ],
)
def test_a_cluster_s_tf_config_is_understood(place, workers, rank, first):
    section = PAGE.partition(f"\n## {place}\n")[2]
    text = re.search(r"```json\n(.*?)```", section, re.S)[1]
    config = read_tf_config({"TF_CONFIG": json.dumps(json.loads(text))})
    assert (config.num_workers, config.rank) == (workers, rank)
    assert config.worker_addresses[0] == first


def test_the_image_is_made_of_what_is_there_and_as_the_readme_installs():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
    installed = " ".join(" ".join(lines).split()).replace("--no-cache-dir ", "")
    for command in (
        'pip install "tensorflow-cpu>=2.17,<2.22"',
        "pip install --no-build-isolation .",
        "gradcomp info",
    ):
        assert command in installed
        assert command in (ROOT / "README.md").read_text()

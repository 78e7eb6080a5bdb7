"""What the page about clusters tells to paste can be pasted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml
from support.requirements import need_package
from support.services.console import REPOSITORY

PAGE = (REPOSITORY / "docs/how-to/read-on-a-cluster.md").read_text("utf-8")
MANIFEST = (REPOSITORY / "deploy/kubernetes/dask.yaml").read_text("utf-8")


@pytest.mark.slow
def test_the_batch_script_is_one():
    [script] = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)


def test_the_manifest_is_one_and_its_parts_find_each_other():
    parts = list(yaml.safe_load_all(MANIFEST))
    assert [part["kind"] for part in parts] == [
        *("Service", "Deployment", "Deployment", "NetworkPolicy")
    ]
    service, *deployments, _ = parts
    for part in deployments:
        labels = part["spec"]["template"]["metadata"]["labels"]
        assert part["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == deployments[0]["spec"]["selector"]["matchLabels"]
    [worker] = deployments[1]["spec"]["template"]["spec"]["containers"]
    assert f"tcp://{service['metadata']['name']}:8786" in worker["args"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_every_flag_of_dask_on_the_page_is_one(role):
    need_package("distributed")
    said = subprocess.run(
        [sys.executable, "-m", "dask", role, "--help"], capture_output=True, text=True, check=True
    ).stdout
    lines = re.sub(r"\\\n\s*", " ", PAGE + MANIFEST).splitlines()
    used = [line for line in lines if re.search(rf"dask,? {role}", line)]
    flags = {flag for line in used for flag in re.findall(r"--[a-z-]+", line.partition("dask")[2])}
    assert flags
    for flag in flags | {"--tls-ca-file", "--tls-cert", "--tls-key", "--interface"}:
        assert flag in said, flag

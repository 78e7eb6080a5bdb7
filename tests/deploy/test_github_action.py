"""The Action: its script on two recordings, with a stand-in for `gh` that notes what it is told."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.traces.recordings import H200, recorded_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "github" / "comment.py"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
BEFORE, AFTER = str(H200 / "1f1b_p3_m7"), str(H200 / "1f1b_p3_m7")
GH = """#!{python}
import json, os, sys
given = json.load(sys.stdin)["body"] if "--input" in sys.argv else None
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:], given]) + "\\n")
if os.environ.get("REFUSED") and given:
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
if "--jq" in sys.argv:
    print(os.environ.get("KNOWN", ""))
"""


def comment(*words, folder, **settings):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env=os.environ | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def pull(tmp_path):
    """A pull request, number 12, and a `gh` that notes its calls."""
    gh = tmp_path / "gh"
    gh.write_text(GH.format(python=sys.executable))
    gh.chmod(0o755)
    (tmp_path / "event.json").write_text(json.dumps({"pull_request": {"number": 12}}))
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
        "GITHUB_REPOSITORY": "some/model",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }


def calls(pull):
    return [json.loads(line) for line in Path(pull["CALLS"]).read_text("utf-8").splitlines()]


def test_a_change_for_the_better_is_a_table_to_paste(tmp_path):
    before, after = recorded_run("1f1b_m8_split3337"), recorded_run("1f1b_m8")
    done = comment(str(before), str(after), "--print", "--fail-on", "worse", folder=tmp_path)
    assert done.returncode == 0
    mark, title, _, sentence = done.stdout.splitlines()[:4]
    assert mark == "<!-- debubble compare: default -->"
    assert title == "### Pipeline bubble, before and after"
    assert sentence.startswith("**Better")
    assert "\n| batch latency (decides) | 378 ms | 298 ms |" in done.stdout


def test_a_change_for_the_worse_fails_the_job_after_it_was_told(tmp_path, pull):
    before, after = recorded_run("1f1b_m8"), recorded_run("1f1b_m8_split3337")
    done = comment(str(before), str(after), "--fail-on", "worse", folder=tmp_path, **pull)
    assert done.returncode == 1
    assert "**Worse" in calls(pull)[-1][1]


def test_the_first_push_adds_a_comment_and_the_summary_has_it_too(tmp_path, pull):
    done = comment(BEFORE, AFTER, folder=tmp_path, **pull)
    assert (done.returncode, done.stdout) == (0, "added a comment\n")
    (listed, _), (posted, body) = calls(pull)
    assert listed[1] == "repos/some/model/issues/12/comments?per_page=100"
    assert posted[:4] == ["api", "--method", "POST", "repos/some/model/issues/12/comments"]
    assert body.startswith("<!-- debubble compare: default -->\n")
    assert Path(pull["GITHUB_STEP_SUMMARY"]).read_text("utf-8") == f"{body}\n"


def test_the_next_push_changes_that_comment(tmp_path, pull):
    done = comment(BEFORE, AFTER, "--key", "p3", folder=tmp_path, KNOWN="991", **pull)
    assert (done.returncode, done.stdout) == (0, "changed comment 991\n")
    (listed, _), (patched, _) = calls(pull)
    assert '"<!-- debubble compare: p3 -->"' in listed[-1]
    assert patched[:4] == ["api", "--method", "PATCH", "repos/some/model/issues/comments/991"]


def test_names_of_files_cannot_write_markup(tmp_path):
    folder = tmp_path / "<img src=x>`|"
    folder.symlink_to(BEFORE)
    done = comment(str(folder), str(folder), "--print", folder=tmp_path)
    assert done.returncode == 0
    assert "<img" not in done.stdout


def test_the_action_hands_every_input_on_as_a_word_of_its_own(tmp_path):
    """The line of action.yml itself, with inputs that a shell would obey."""
    step = ACTION["runs"]["steps"][-1]
    assert "${{" not in step["run"]
    inputs = {name: about.get("default", "") for name, about in ACTION["inputs"].items()}
    inputs |= {"before": BEFORE, "after": AFTER, "title": "$(touch pwned) `id`; a", "fail-on": ""}
    settings = {"ACTION": str(ROOT)}
    for name, value in step["env"].items():
        match = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value)
        if match and match[1] != "token":
            settings[name] = inputs[match[1]]
    (tmp_path / "python").symlink_to(sys.executable)
    done = subprocess.run(
        ["/bin/bash", "-c", f"{step['run']} --print"],
        env=os.environ | settings | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "### $(touch pwned) `id`; a" in done.stdout
    assert not (tmp_path / "pwned").exists()
    assert set(shlex.split(step["run"])) >= {"$BEFORE", "$AFTER"}

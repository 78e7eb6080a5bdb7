"""Two runs in → the table of `debubble compare` as one comment on a pull request, kept up to date.

    python deploy/github/comment.py BEFORE AFTER --fail-on worse,unsafe_memory
    python deploy/github/comment.py BEFORE AFTER --print        # to stdout, and nowhere else

Run by `action.yml`. The comment is found again by a mark in its first line: the next push changes
it in place of adding another. It is posted by `gh`, which has the token; where that may not write,
as on a pull request from a fork, the table is in the job's summary alone. Ends as `compare` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

MARK = "<!-- debubble compare: {key} -->"
# GitHub takes 65,536 characters.
MOST_LETTERS = 60_000
NO_ANSWER = 2


def compare(asked: argparse.Namespace) -> tuple[str, int]:
    """Return the table, or why there is none, and the exit code."""
    words = ["compare", asked.before, asked.after, "--markdown", "--quiet"]
    for flag in ("fail_on", "threshold", "memory_limit", "tokens"):
        value = getattr(asked, flag)
        if value:
            words += [f"--{flag.replace('_', '-')}", value]
    done = subprocess.run(
        [sys.executable, "-m", "debubble", *words], capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    if done.stdout:
        return done.stdout, done.returncode
    said = done.stderr.replace("```", "'''")
    return f"There is no answer.\n\n```text\n{said}```\n", done.returncode or NO_ANSWER


def write_comment(asked: argparse.Namespace, table: str) -> str:
    """Return the comment: a mark to find it by, a title, the table."""
    body = f"{MARK.format(key=asked.key)}\n### {asked.title}\n\n{table}"
    return body if len(body) <= MOST_LETTERS else f"{body[:MOST_LETTERS]}\n\n(cut off)\n"


def pull_request() -> int | None:
    """Return the number of the pull request that this runs for, if any."""
    event = os.environ.get("GITHUB_EVENT_PATH")
    if not event:
        return None
    told = json.loads(Path(event).read_text("utf-8"))
    number = told.get("pull_request", {}).get("number")
    return int(number) if number is not None else None


def ask_github(*words: str, body: str | None = None) -> str:
    """Call `gh api`; what it is given comes by stdin, never as words of a shell."""
    given = None if body is None else json.dumps({"body": body})
    gh = shutil.which("gh") or "gh"
    done = subprocess.run(
        [gh, "api", *words, *(["--input", "-"] if given else [])],
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def post(comment: str, number: int, key: str) -> str:
    """Change the comment of an earlier run, or add one; return what was done."""
    base = f"repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    mark = MARK.format(key=key)
    # One JSON string a line, of those that begin with the mark.
    wanted = f".[] | select(.body | startswith({json.dumps(mark)})) | .id"
    listed = ask_github(f"{base}/{number}/comments?per_page=100", "--paginate", "--jq", wanted)
    known = listed.split()
    if known:
        ask_github("--method", "PATCH", f"{base}/comments/{known[0]}", body=comment)
        return f"changed comment {known[0]}"
    ask_github("--method", "POST", f"{base}/{number}/comments", body=comment)
    return "added a comment"


def main() -> None:
    """Compare, tell, and end as `compare` ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--fail-on", default="")
    parser.add_argument("--threshold", default="")
    parser.add_argument("--memory-limit", default="")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--title", default="Pipeline bubble, before and after")
    parser.add_argument("--key", default="default", help="One comment a key.")
    parser.add_argument("--print", dest="printed", action="store_true")
    asked = parser.parse_args()
    if not asked.key.replace("-", "").isalnum():
        parser.error("--key is letters, digits and dashes")
    table, code = compare(asked)
    comment = write_comment(asked, table)
    if asked.printed:
        print(comment)
        sys.exit(code)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"{comment}\n")
    number = pull_request()
    if number is not None:
        try:
            print(post(comment, number, asked.key))
        except (subprocess.CalledProcessError, OSError) as error:
            why = getattr(error, "stderr", "") or str(error)
            print(f"::warning::no comment was posted: {why.strip().splitlines()[-1]}")
    sys.exit(code)


if __name__ == "__main__":
    main()

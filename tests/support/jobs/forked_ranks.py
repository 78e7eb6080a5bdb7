"""Runs the ranks of jobs as forks of one process: importing torch takes longer than most jobs.

Each line of stdin is a job: its function, its ranks, its folder, its settings. What its ranks ended
with is printed; what each of them wrote is in `.outputN` of the folder.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]
# A guard against hanging, far above what a busy machine needs.
PATIENCE_S = 240


def environment_of_ranks():
    """Return what processes need that run ranks on this machine."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return os.environ | settings


@cache
def launcher():
    """Start what runs all jobs of this process; it ends when its stdin does."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        env=environment_of_ranks(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_ranks(function, ranks, folder, **settings):
    """Run `module:function(folder, rank, **settings)` as each rank; return codes and outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    process = launcher()
    process.stdin.write(f"{json.dumps([function, ranks, str(folder.resolve()), settings])}\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
        os.killpg(process.pid, signal.SIGKILL)
        launcher.cache_clear()
        raise TimeoutError(f"the ranks hang: {folder}")
    codes = json.loads(process.stdout.readline())
    return codes, [(folder / f".output{rank}").read_text("utf-8") for rank in range(ranks)]


def fork(function, rank, folder, settings):
    child = os.fork()
    if child:
        return child
    os.chdir(folder)
    output = os.open(f".output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        function(Path(folder), rank, **settings)
        code = 0
    except BaseException:  # noqa: BLE001 (a fork must not run on into its parent's code)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    for line in sys.stdin:
        name, ranks, folder, settings = json.loads(line)
        module, _, function = name.partition(":")
        function = getattr(importlib.import_module(module), function)
        children = [fork(function, rank, folder, settings) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(f"{json.dumps(codes)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

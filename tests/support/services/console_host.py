"""Runs commands of debubble, each in a fork of its own: importing takes longer than most of them.

Each line of stdin is a command: its words, its folder, its environment, and where its output goes.
What it ended with is printed. This process has one thread and does nothing else, so that a fork of
it is as good as a process just started.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress

from debubble.cli import VERBS, main

# Far more than any command takes on a busy machine; one that hangs is ended by SIGALRM.
PATIENCE_S = 180


def run(words, folder, environment, out, err):
    """Run one command to its end; as a process does, with nothing left in a buffer."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, place in ((1, out), (2, err)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["debubble", *words]
    code = 1
    try:
        main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (a fork must not run on into its parent's code)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve():
    for verb in VERBS:
        importlib.import_module(f"debubble.cli.{verb}")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            signal.alarm(PATIENCE_S)
            run(**order)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()

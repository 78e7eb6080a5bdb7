"""What a reader does with emitted text: pastes it into a shell, and looks at what arrives."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

from hypothesis import strategies as st

from debubble.plan.change import Setting

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def code_of(text):
    """The lines that are no comment."""
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))


def comments_of(text):
    return [line[2:] for line in text.splitlines() if line.startswith("#")]


def flags_of(text):
    """The flags as a dict, each with its words, without a shell's arithmetic."""
    flags = {}
    for word in shlex.split(code_of(text).replace(" \\\n", " ")):
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def paste_flags(text, **variables):
    """What a program gets that a real shell starts with these flags; None if the shell refuses."""
    command = shlex.join([sys.executable, "-c", SHOW]) + " " + code_of(text)
    return _run(command, variables)[0]


def paste_exports(text, **variables):
    """The environment that a program gets after the text in a real shell."""
    return _run(text + shlex.join([sys.executable, "-c", SHOW]), variables)[1]


def _run(script, variables):
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        env={name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else (None, None)


@st.composite
def splits(draw, most_chunks=4, *, empty_ends=False):
    """Ranks, chunks, and any split over their stages; the ends may be without layers."""
    ranks, chunks = draw(st.integers(2, 8)), draw(st.integers(1, most_chunks))
    stages = ranks * chunks
    split = draw(st.lists(st.integers(1, 12), min_size=stages, max_size=stages))
    if empty_ends and stages > 2:
        split[0], split[-1] = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return ranks, chunks, tuple(split)


def setting_for(ranks, split, **known):
    return Setting(ranks=ranks, layers=sum(split), **known)

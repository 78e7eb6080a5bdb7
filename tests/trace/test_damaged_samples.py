"""Samples of others' formats, damaged at random: figures, or an error that says what is wrong."""

from __future__ import annotations

import shutil
from random import Random

import pytest
from fuzz.mutate import BYTE_MUTATORS
from support.services.console import REPOSITORY

import debubble
from debubble.errors import DebubbleError
from debubble.trace.source import DEFAULT_LIMITS
from debubble.trace.timer_logs import read_stage_times

SAMPLES = REPOSITORY / "tests" / "data" / "formats"


@pytest.mark.parametrize(
    "name",
    [
        "primus/pp_rank_1.json",
        "primus/config.json",
        "spans.json",
        "slow_device.csv",
        "deepspeed.log",
        "megatron.log",
        "ascend_rank0.json",
    ],
)
def test_no_damage_ends_in_a_traceback(name, tmp_path):
    random = Random(name)  # noqa: S311 (damage is no secret)
    if "/" in name:
        shutil.copytree(SAMPLES / "primus", tmp_path / "primus")
    else:
        shutil.copy(SAMPLES / name, tmp_path / name)
    sound = (tmp_path / name).read_bytes()
    for _ in range(25):
        (tmp_path / name).write_bytes(random.choice(BYTE_MUTATORS)(random, sound))
        try:
            debubble.analyse(str(tmp_path / name.split("/")[0])).pipeline  # noqa: B018
        except DebubbleError as error:
            assert error.message  # noqa: PT017


def test_no_damage_to_a_log_of_costs_ends_in_a_traceback(tmp_path):
    random = Random("costs")  # noqa: S311 (damage is no secret)
    sound, path = (SAMPLES / "megatron.log").read_bytes(), tmp_path / "megatron.log"
    for _ in range(200):
        path.write_bytes(random.choice(BYTE_MUTATORS)(random, sound))
        try:
            found = read_stage_times(str(path), limits=DEFAULT_LIMITS)
        except DebubbleError as error:
            assert error.message  # noqa: PT017
        else:
            assert len(found.forward_ns) == found.ranks * found.chunks

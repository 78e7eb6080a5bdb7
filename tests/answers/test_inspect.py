"""What `inspect` says of the files that it found."""

from __future__ import annotations

import pytest
from support.traces.recordings import H200

from debubble.answers.inspect import answer_inspect
from debubble.trace.run import find_run, read_run


@pytest.mark.parametrize(
    ("present", "said"), [((0, 3), "missing: ranks 1-2."), ((0, 1, 3), "missing: rank 2.")]
)
def test_one_missing_rank_is_a_rank_and_several_are_ranks(present, said):
    files = [str(H200 / "fwd_closed_m4" / f"rank{rank}.json.gz") for rank in present]
    assert answer_inspect(read_run(find_run(files))).verdict.endswith(said)

"""Whom ranks waited for: grouped from the account, the longest first, with examples."""

from __future__ import annotations

from collections import Counter

import numpy as np

import debubble
from debubble.ledger import account as account_module
from debubble.ledger.causes import CAUSES, RootKind
from debubble.timeline.model import PassKind


def long_pipeline(path, stages, microbatches=3):
    """GPipe over equal stages, as a table."""
    lines = ["step,stage,microbatch,op,start_us,duration_us"]
    turn = (stages + microbatches) * 1000
    for stage in range(stages):
        for number in range(microbatches):
            lines.append(f"0,{stage},{number},F,{(stage + number) * 1000},1000")
            back = turn + (stages - 1 - stage + number) * 1000
            lines.append(f"0,{stage},{number},B,{back},1000")
    path.write_text("\n".join(lines))
    return str(path)


def test_waits_of_a_long_pipeline_are_grouped_and_not_looked_at_one_by_one(tmp_path, monkeypatch):
    """Each rank waits for every other: of thousands of waits only examples become objects."""
    looked_at = []
    example = account_module._example
    monkeypatch.setattr(
        account_module, "_example", lambda *words: looked_at.append(1) or example(*words)
    )
    analysis = debubble.analyse(long_pipeline(tmp_path / "ops.csv", 40))
    waits = sum(len(account) for account in analysis.ledger.accounts)
    found = account_module.find_culprits(
        analysis.ledger.accounts, analysis.ledger.ranks, waiter=39, most=2
    )
    assert waits > 3000
    assert len(found) == 2
    assert len(looked_at) < 3 * (len(analysis.ledger.culprits) + 3)


def test_culprits_are_what_adding_waits_up_one_by_one_gives(tmp_path):
    ledger = debubble.analyse(long_pipeline(tmp_path / "ops.csv", 6)).ledger
    waited = Counter()
    for step, account in zip(ledger.steps, ledger.accounts, strict=True):
        passes = step.program.passes
        for row in np.flatnonzero(account.root_kind == RootKind.PASS).tolist():
            root = account.root[row]
            who = CAUSES[account.cause[row]], int(passes.stage[root]), PassKind(passes.kind[root])
            waited[who] += int(account.length_ns[row])
    told = {(one.cause, one.stage, PassKind[one.kind]): one.wait_ns for one in ledger.culprits
            if one.kind}  # fmt: skip
    assert told == dict(waited)
    longest = [one.wait_ns for one in ledger.culprits]
    assert longest == sorted(longest, reverse=True)
    for one in ledger.culprits:
        lengths = [example.dur_us for example in one.examples]
        assert 1 <= len(lengths) <= 3
        assert lengths == sorted(lengths, reverse=True)

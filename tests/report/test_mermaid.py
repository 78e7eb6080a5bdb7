"""The Mermaid diagram: every line is of its grammar, every stage, hop and wait is in it."""

from __future__ import annotations

import json
import re

import pytest
from support.services.console import type_command
from support.timelines.engine_runs import timeline_of
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.errors import UsageError
from debubble.ledger.hop_health import account_for
from debubble.ledger.verdict import name_causes
from debubble.report.svg import MOST_EDGES, draw_mermaid
from debubble.timeline.figures import measure_pipeline

# Nothing in a label may end it, nor be a tag, a code or Markdown of its own.
LABEL = r'"(?!`)(?:[^"<>#&`\n]|<br/>|#(?:quot|lt|gt|amp|35|96);)+"'
GRAMMAR = [
    rf"    subgraph r(?P<rank>\d+)\[{LABEL}\]",
    rf"        s(?P<stage>\d+)\[{LABEL}\]",
    rf"        w(?P<wait>\d+)\({LABEL}\)",
    r"    end",
    rf"    s(?P<source>\d+) (?:-->|-\.->)\|{LABEL}\| s(?P<to>\d+)",
    r"    style s(?P<framed>\d+) stroke:#[0-9a-f]{6},stroke-width:4px",
    r"    linkStyle (?P<edge>\d+) stroke:#[0-9a-f]{6},stroke-width:4px",
]


def parse(text):
    """Return what the lines name, in order; fail on a line that is not of the grammar."""
    fence, dashes, title, more, kind, *lines, end = text.splitlines()
    assert (fence, dashes, more, kind, end) == ("```mermaid", "---", "---", "flowchart LR", "```")
    named = {"title": json.loads(title.removeprefix("title: "))}
    for line in lines:
        [match] = [found for rule in GRAMMAR if (found := re.fullmatch(rule, line))]
        for name, number in match.groupdict().items():
            named.setdefault(name, []).append(int(number))
    assert lines.count("    end") == len(named["rank"])
    return named


def diagram(timeline, answer="Ranks wait."):
    figures = measure_pipeline(timeline, 0)
    ledger = account_for(timeline, figures)
    return draw_mermaid(figures, ledger, name_causes(ledger) if ledger else (), answer)


@pytest.fixture(scope="module")
def recorded():
    return build_recording(H200 / "1f1b_p3_m7")


def test_ranks_stages_waits_and_hops_are_all_in_it(recorded):
    named = parse(diagram(recorded))
    assert named["rank"] == named["wait"] == named["stage"] == [0, 1, 2]
    assert list(zip(named["source"], named["to"], strict=True)) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_it_says_what_find_says(recorded):
    text = diagram(recorded)
    assert 's0["stage 0<br/>F 3.65 ms<br/>B 8.10 ms"]' in text
    assert 's1["stage 1<br/>F 6.22 ms<br/>B 14.2 ms<br/>imbalance: 18.6 ms"]' in text
    assert '|"8.00 MiB<br/>wire 1.28 ms<br/>wait 0 ns"| s1' in text
    assert "waits 106 ms (57.0 %)<br/>turnaround 69.2 ms" in text
    assert parse(text)["framed"] == [1]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "forward-only"])
def test_every_placement_of_stages_is_of_the_grammar(name):
    named = parse(diagram(timeline_of(name, 4, 8)))
    stages = 4 if name in {"1f1b", "forward-only"} else 8
    assert sorted(named["stage"]) == list(range(stages))
    assert set(named["source"]) | set(named["to"]) <= set(named["stage"])


def test_a_strangers_name_is_no_part_of_the_grammar(recorded):
    answer = 'a "b" <script> `c` #d; \n```\n&e'
    assert parse(diagram(recorded, answer))["title"] == answer.replace("\n", "\\n")


def test_what_mermaid_would_not_draw_is_refused():
    ranks = MOST_EDGES // 2 + 2
    timeline = timeline_of("1f1b", ranks, 1)
    with pytest.raises(UsageError, match=f"no more than {MOST_EDGES} lines"):
        draw_mermaid(measure_pipeline(timeline, 0), None, (), "")


def test_the_command_line_prints_it_alone(tmp_path):
    answer = type_command("debubble find tests/data/h200/1f1b_p2_m4 --mermaid", tmp_path)
    assert parse(answer.text)["title"].startswith("Ranks wait 25 %")
    refused = type_command("debubble find tests/data/h200/1f1b_p2_m4 --mermaid --json", tmp_path)
    assert (refused.code, "--mermaid" in refused.text) == (2, True)

"""The picture of a step: valid, complete, harmless and small."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from support.services.console import REPOSITORY, type_command
from support.timelines.by_hand import a_timeline
from support.timelines.engine_runs import timeline_of
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.ledger.causes import Cause
from debubble.ledger.hop_health import account_for
from debubble.report.frame import frame_step
from debubble.report.palette import KINDS
from debubble.report.svg import draw_svg
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind

MS = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"
# The lanes of a picture, in its units.
LEFT, ACROSS = 66, 850
BOX = re.compile(r"M(\S+) (\S+)h(\S+)v\S+H\S+z")


def framed(timeline, step=None):
    ledger = account_for(timeline, measure_pipeline(timeline, 0))
    return frame_step(timeline, 0, step, ledger.waits)


@pytest.fixture(scope="module")
def recorded():
    return framed(build_recording(H200 / "1f1b_p3_m7"), 2)


def drawn(frame, answer="Ranks wait."):
    return ET.fromstring(draw_svg(frame, answer))  # noqa: S314 (we wrote it)


def boxes(picture, fill):
    """Left and width of each box with a fill, by the top of its lane."""
    found = [path for path in picture.iter(f"{SVG}path") if path.get("fill") == fill]
    lanes = {}
    for left, top, width in BOX.findall("".join(path.get("d") for path in found)):
        lanes.setdefault(float(top), []).append((float(left), float(width)))
    return lanes


def texts(picture, style=None):
    """All texts, or those of a style, which may be their group's."""
    found = [
        (text.text, [*parent.get("class", "").split(), *text.get("class", "").split()])
        for parent in picture.iter()
        for text in parent.findall(f"{SVG}text")
    ]
    return [text for text, styles in found if style is None or style in styles]


def test_every_pass_is_where_its_time_is(recorded):
    picture = drawn(recorded)
    for kind in (PassKind.F, PassKind.B):
        passes = recorded.passes.where(recorded.passes.kind == kind)
        expected = LEFT + ACROSS * (passes.start_ns - recorded.begin_ns) / recorded.length_ns
        lanes = boxes(picture, KINDS[kind].fill)
        assert len(lanes) == 3
        lefts = sorted(left for lane in lanes.values() for left, _ in lane)
        assert lefts == pytest.approx(sorted(expected.tolist()), abs=0.06)


def test_waits_of_a_cause_are_as_long_as_the_ledger_says(recorded):
    lanes = boxes(drawn(recorded), f"url(#h-{Cause.TURNAROUND})")
    waited = sum(w.end_ns - w.start_ns for w in recorded.waits if w.cause == Cause.TURNAROUND)
    shown = sum(width for lane in lanes.values() for _, width in lane)
    assert shown == pytest.approx(ACROSS * waited / recorded.length_ns, rel=0.02)


@pytest.mark.parametrize(
    "name", ["</title><script>alert(1)</script>", "a\x00\x1b\ufffe\ud800&<\"'"]
)
def test_a_strangers_name_does_nothing(recorded, name):
    picture = drawn(recorded, name)
    assert not list(picture.iter(f"{SVG}script"))
    assert picture.find(f"{SVG}title").text.startswith(name[:1])


def test_a_rank_with_two_stages_says_which_under_each_pass():
    picture = drawn(framed(timeline_of("zbv", 2, 4)))
    assert set(texts(picture, "s")) == {"0", "1", "2", "3"}


def test_passes_side_by_side_share_the_lane():
    passes = [(0, 0, "F", 0, 0, 0, 30), (0, 1, "B", 1, 0, 10, 40), (0, 1, "W", 2, 0, 40, 60)]
    picture = drawn(frame_step(a_timeline(passes, stages=((0, 1),)), 0, None))
    tops = {kind: min(boxes(picture, KINDS[PassKind[kind]].fill)) for kind in "FBW"}
    assert tops["B"] == tops["F"] + 13
    assert tops["W"] == tops["F"]
    assert texts(picture, "s") == ["0", "1"]


def test_passes_of_another_step_are_pale_and_the_legend_says_so():
    passes = [(0, 0, "F", 0, 0, 0, 40), (0, 0, "F", 0, 1, 30, 60), (1, 1, "F", 0, 0, 40, 80)]
    picture = drawn(frame_step(a_timeline(passes), 0, 0))
    assert [path.get("fill") for path in picture.iter(f"{SVG}path") if path.get("opacity")]
    assert (
        texts(picture, "muted")[-1] == "numbers: microbatches; pale: another step; blank: no pass"
    )


def test_thousands_of_passes_that_nobody_could_tell_apart_are_drawn_as_one():
    passes = [(0, 0, "F", n, 0, n, n + 1) for n in range(20_000)]
    text = draw_svg(frame_step(a_timeline(passes, stages=((0,),)), 0, None), "Ranks wait.")
    assert len(text) < 10_000


def test_the_command_line_writes_it_and_replaces_nothing_unforced(tmp_path):
    words = "debubble find tests/data/h200/1f1b_p2_m4 --quiet --svg step.svg"
    assert type_command(words, tmp_path).text.startswith("Ranks wait 25 %")
    picture = ET.parse(tmp_path / "step.svg").getroot()  # noqa: S314 (we wrote it)
    assert picture.find(f"{SVG}title").text.startswith("Ranks wait 25 %")
    again = type_command(words, tmp_path)
    assert (again.code, "--force" in again.text) == (2, True)
    assert type_command(f"{words} --force", tmp_path).code == 0


def test_the_picture_in_the_readme_is_the_one_drawn_now(tmp_path, request):
    kept = REPOSITORY / "docs" / "pictures" / "timeline.svg"
    type_command("debubble find tests/data/h200/1f1b_p3_m7 --svg now.svg", tmp_path)
    drawn_now = (tmp_path / "now.svg").read_text("utf-8")
    if request.config.getoption("--update-golden"):
        kept.write_text(drawn_now, "utf-8")
    assert kept.read_text("utf-8") == drawn_now
    assert "docs/pictures/timeline.svg" in (REPOSITORY / "README.md").read_text("utf-8")


def test_the_name_of_a_rank_among_thousands_stays_inside_the_picture():
    timeline = a_timeline([(0, 0, "F", 0, 0, 0, 8)], stages=((0,),))
    rank = replace(timeline.ranks[0], rank=16_383)
    passes = replace(timeline.passes, rank=timeline.passes.rank + 16_383)
    frame = frame_step(replace(timeline, ranks=(rank,), passes=passes), 0, None)
    [name] = [text for text in drawn(frame).iter(f"{SVG}text") if text.text == "rank 16383"]
    assert float(name.get("x")) + 0.1 >= 0.57 * float(name.get("font-size")) * len(name.text)

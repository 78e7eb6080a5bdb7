"""The file is safe and alone: every name escaped, one script, one style, nothing asked for."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from support.services.console import type_command

from debubble.cli.options import place_for
from debubble.errors import Code, Gap, UsageError
from debubble.ledger.causes import Cause
from debubble.report.html.measured import find_report
from debubble.report.html.page import Report, report_markup
from debubble.report.html.plan import Point, option_list, scatter
from debubble.report.html.sections import (
    Cell,
    Pair,
    matrix_markup,
    pair_bars,
    slowness_of,
    table_markup,
)
from debubble.report.text import Page, Table

NASTY = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture(scope="module")
def nasty():
    page = Page(
        answer=NASTY,
        findings=[NASTY],
        tables=[Table(columns=(NASTY,), rows=[(NASTY,)], title=NASTY)],
        notes=[NASTY],
        gaps=[Gap(code=Code.MALFORMED, message=NASTY, hint=NASTY, file=NASTY)],
        next_command=NASTY,
    )
    view = {"name": NASTY}
    return report_markup(
        Report(verb="find", run=NASTY, page=page, tiles=[(NASTY, NASTY)], views=[view])
    )


def test_no_name_becomes_markup(nasty):
    assert "<img" not in nasty
    assert nasty.count("<script") == 2
    assert nasty.count("</script>") == 2
    assert "\x1b" not in nasty


def test_the_policy_allows_the_page_s_own_script_and_style_and_nothing_else(nasty):
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', nasty)
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", nasty, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert " style=" not in nasty
    assert not re.search(r"<[^>]* on[a-z]+=", nasty)


def test_the_page_names_no_address(recorded):
    text = report_markup(find_report([recorded], Page(answer="x"), "x"))
    assert not re.findall(r"https?://|//[a-z]+\.|@import|url\((?!#)", text)


def test_a_file_is_replaced_only_by_force(tmp_path):
    place = tmp_path / "a.html"
    assert place_for(str(place), force=False) == place
    place.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        place_for(str(place), force=False)
    assert place_for(str(place), force=True) == place
    with pytest.raises(UsageError, match="no folder"):
        place_for(str(tmp_path / "none" / "a.html"), force=False)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("find tests/data/h200/1f1b_p2_m4", "Measured, replayed, ideal"),
        ("plan tests/data/h200/1f1b_p2_m4", "Options: latency against memory"),
        ("plan tests/data/h200/1f1b_p2_m4", "Measured and planned"),
        ("compare tests/data/h200/1f1b_p2_m4 tests/data/h200/1f1b_p2_m4", "Before and after"),
        ("links tests/data/h200/1f1b_p2_m4", 'class="matrix"'),
    ],
)
def test_each_verb_writes_its_report_and_says_where(command, shown, tmp_path):
    answer = type_command(f"debubble {command} --html out.html", tmp_path)
    assert "out.html written; open it in a browser" in answer.text
    assert shown in (tmp_path / "out.html").read_text("utf-8")


def test_a_slow_hop_is_framed_and_says_so():
    cells = {(0, 1): Cell(slowness=0.99, lines=("1 GB/s",), slow=True)}
    text = matrix_markup([0, 1], cells)
    assert text.count('class="s3 slow"') == text.count("<b>slow</b>") == 1
    assert text.count("<td></td>") == 3


def test_hops_that_are_alike_are_shaded_alike():
    alike = slowness_of({(0, 1): 1.00, (1, 0): 1.01})
    assert max(alike.values()) < 0.25
    apart = slowness_of({(0, 1): 1.0, (1, 0): 4.0})
    assert apart[0, 1] == 0
    assert 0.99 < apart[1, 0] < 1


def point(peak, **more):
    known = {"name": "x", "latency_ns": 1e8, "low_ns": 9e7, "high_ns": 1.1e8, "style": "do"}
    return Point(**(known | {"peak_bytes": peak} | more))


def test_the_limit_is_drawn_where_it_is_near_and_said_where_it_is_far():
    gib = 2.0**30
    near = scatter([point(4 * gib), point(5 * gib)], 6 * gib)
    assert 'class="limit"' in near
    assert "limit 6.00 GiB" in near
    far = scatter([point(4 * gib), point(5 * gib)], 80 * gib)
    assert 'class="limit"' not in far
    assert "limit 80.0 GiB, far to the right" in far


def test_names_of_options_stay_in_the_chart_and_the_run_as_it_is_lies_on_top():
    gib = 2.0**30
    points = [point(4 * gib, style="now")]
    points += [point((4 + place / 50) * gib, gain="+5 %") for place in range(6)]
    points += [point(2 * gib, gain="+9 %"), point(2.01 * gib, gain="+9 %")]
    text = scatter(points, None)
    [width] = {float(found) for found in re.findall(r'viewBox="0 0 (\d+) ', text)}
    names = re.findall(r'<text class="strong" x="([\d.-]+)" y="[\d.]+">([^<]+)</text>', text)
    assert len(names) == len(points)
    # On the left are the labels of the axis.
    assert all(110 <= float(x) <= width - 8 * len(name) for x, name in names)
    assert text.rindex('class="now"') > text.rindex("<circle")


def test_a_name_that_does_not_stand_beside_its_point_is_led_to_it():
    gib = 2.0**30
    apart = [point((4 + place) * gib) for place in range(3)]
    crowded = [point((4 + place / 500) * gib) for place in range(6)] + [point(9 * gib)]
    leader = r'<path class="rule" d="M[\d.]+ [\d.]+L'
    assert not re.findall(leader, scatter(apart, None))
    assert re.findall(leader, scatter(crowded, None))


def test_the_list_says_what_to_do_and_what_to_try():
    points = [point(1, style="now"), point(1, advice="do"), point(1, advice="try"), point(1)]
    assert re.findall(r"<li>(?:<b>(\w+):</b> )?x", option_list(points)) == ["do", "try", ""]


def test_paths_break_behind_a_stroke_and_hops_do_not_break():
    table = Table(columns=("hop", "file"), rows=[("0 ↔ 1", "a/b.json"), ("1 → 2", "0.5 a/b")])
    text = table_markup(table)
    assert "0\u00a0↔\u00a01" in text
    assert "1\u00a0→\u00a02" in text
    assert "a/<wbr>b.json" in text
    assert "0.5 a/b" in text


def test_without_memory_there_is_no_chart_of_it():
    assert not scatter([point(None)], None)


def test_pairs_are_drawn_to_scale():
    text = pair_bars([Pair(name="a", before=10, after=5, shown=("10", "5"))], "x")
    before, after = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text))
    assert before == pytest.approx(2 * after)


def page_of(words, folder):
    type_command(f"debubble {words} --html out.html", folder)
    return (folder / "out.html").read_text("utf-8")


def test_find_says_what_to_do_first_and_what_each_cause_means(tmp_path):
    text = page_of("find tests/data/h200/1f1b_p3_m7", tmp_path)
    assert "Stage 1 on rank 1 takes 1.2 times the average stage; equal stages would save" in text
    assert "<code>debubble plan tests/data/h200/1f1b_p3_m7</code>" in text
    meanings = text.split('<dl class="causes">')[1].split("</dl>")[0]
    assert Cause.IMBALANCE.about.meaning in meanings
    assert Cause.WAY_BACK.about.meaning not in meanings


def test_plan_draws_the_planned_step_and_todays_only_beside_it(tmp_path):
    text = page_of("plan tests/data/h200/1f1b_p3_m7", tmp_path)
    assert "<h2>Measured and planned</h2>" in text
    assert "<h2>Timeline</h2>" not in text
    assert "ideal" not in text.split("<main>")[1].split("<script")[0]


def test_compare_shows_causes_before_and_after(tmp_path):
    pair = "tests/data/h200/1f1b_p2_m4 tests/data/h200/1f1b_p2_m4"
    page = page_of(f"compare {pair}", tmp_path)
    assert "; microbatches a second" in page
    section = page.split("<h2>Where the time goes</h2>")[1]
    assert "before, compute" in section.split("</section>")[0]
    assert "after, compute" in section.split("</section>")[0]


def test_a_figure_and_a_hop_stay_on_one_line():
    table = Table(columns=("hop", "size"), rows=[("0 → 1", "8.00 MiB")])
    assert table_markup(table).count('class="n"') == 2
    assert "0\u00a0→\u00a01" in table_markup(table)

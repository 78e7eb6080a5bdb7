"""The report in a real browser: it loads alone, is what was measured, and answers to hands."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pytest
from support.services.console import type_command
from support.traces.recordings import H200

from debubble.report.palette import DARK, KINDS, LIGHT
from debubble.timeline.model import PassKind

pytestmark = pytest.mark.service

# As board.js has them.
LEFT, RIGHT = 88, 34
LANES = "document.querySelector('canvas.lanes')"
CONTROL, SHIFT = 2, 8


def state(page, what=LANES):
    """What a canvas says of what it shows."""
    found = page.evaluate(f"({{...{what}.dataset}})")
    return {
        name: float(value) if re.fullmatch(r"-?[\d.e+-]+", value) else value
        for name, value in found.items()
    }


def box(page, what=LANES):
    """Where a canvas is on the screen, scrolled to."""
    page.evaluate(f"{what}.scrollIntoView({{block: 'center'}})")
    page.settle()
    return page.evaluate(f"(b => [b.x, b.y, b.width, b.height])({what}.getBoundingClientRect())")


def pixels(page, clip):
    """A part of the screen, as height x width x 3 numbers: decoded by the browser itself."""
    x, y, width, height = clip
    area = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    area["y"] += page.evaluate("scrollY")
    png = page.call("Page.captureScreenshot", format="png", clip=area)["data"]
    text = page.evaluate(f"""(async () => {{
        const image = new Image();
        image.src = 'data:image/png;base64,{png}';
        await image.decode();
        const canvas = new OffscreenCanvas(image.width, image.height);
        const context = canvas.getContext('2d');
        context.drawImage(image, 0, 0);
        const data = context.getImageData(0, 0, image.width, image.height).data;
        let text = '';
        for (let i = 0; i < data.length; i += 8192)
          text += String.fromCharCode(...data.subarray(i, i + 8192));
        return image.width + ',' + image.height + ',' + btoa(text);
    }})()""")
    across, down, data = text.split(",")
    found = np.frombuffer(base64.b64decode(data), np.uint8)
    return found.reshape(int(down), int(across), 4)[..., :3].astype(int)


def rgb(colour):
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])


def kinds_in(row):
    """Tell a row of pixels by the kinds of passes: their number, or -1."""
    found = np.full(len(row), -1)
    for kind in (PassKind.F, PassKind.B):
        for shade in (1.0, 0.86, 0.5):
            near = np.abs(row - rgb(KINDS[kind].fill) * shade).max(axis=1) <= 6
            found[near] = kind
    return found


def test_it_loads_without_a_complaint_and_asks_for_nothing(page, report_file):
    assert page.complaints() == []
    assert page.requests() == [report_file.as_uri()]
    assert state(page)["mode"] == "exact"


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_what_is_seen_has_the_shape_of_the_step(page, recorded, ratio):
    """Each column of each lane, a little below its top, has the colour of the pass of that time."""
    page.resize(1400, 900, ratio)
    page.settle()
    x, y, width, _ = box(page)
    seen = pixels(page, (x + LEFT, y, width - LEFT - RIGHT, 110))
    step = recorded.ledger.steps[0]
    columns = seen.shape[1]
    moments = (np.arange(columns) + 0.5) / columns * state(page)["to"]
    for place in range(2):
        row = seen[round((6 + 46 * place + 2.5 + 6) * seen.shape[0] / 110)]
        expected = np.full(columns, -1)
        table = step.program.passes
        for one in np.flatnonzero(table.place == place).tolist():
            inside = (moments >= step.times.pass_start[one]) & (moments < step.times.pass_end[one])
            expected[inside] = table.kind[one]
        assert {0, 1} <= set(expected.tolist())
        assert np.mean(kinds_in(row) == expected) >= 0.97


def test_turning_the_wheel_with_control_zooms_to_the_pointer_and_memory_follows(page):
    x, y, width, _ = box(page)
    middle = x + LEFT + 0.25 * (width - LEFT - RIGHT), y + 30
    before = state(page)
    for _ in range(5):
        page.mouse("mouseWheel", *middle, deltaX=0, deltaY=-50, modifiers=CONTROL)
    page.settle()
    after = state(page)
    share = (0.25 * before["to"] - after["from"]) / (after["to"] - after["from"])
    assert after["to"] - after["from"] < 0.3 * before["to"]
    assert share == pytest.approx(0.25, abs=0.02)
    memory = state(page, "document.querySelector('canvas.memory')")
    assert (memory["from"], memory["to"]) == (after["from"], after["to"])


def test_a_drag_pans_and_a_drag_with_shift_marks_a_stretch(page):
    x, y, width, _ = box(page)
    plot = width - LEFT - RIGHT
    whole = state(page)["to"]
    begin, end = (x + LEFT + 0.2 * plot, y + 30), (x + LEFT + 0.6 * plot, y + 30)
    page.drag(begin, end, SHIFT)
    marked = state(page)
    assert marked["from"] == pytest.approx(0.2 * whole, rel=0.01)
    assert marked["to"] == pytest.approx(0.6 * whole, rel=0.01)
    page.drag(end, (end[0] - 0.1 * plot, end[1]))
    panned = state(page)
    assert panned["from"] == pytest.approx(0.24 * whole, rel=0.01)
    assert panned["to"] - panned["from"] == pytest.approx(marked["to"] - marked["from"])


def test_pointing_at_a_wait_says_who_was_waited_for(page, recorded):
    step = recorded.ledger.steps[0]
    waits = [one for one in recorded.ledger.waits if one.step == step.number]
    longest = max(
        (one for one in waits if one.waits_for), key=lambda one: one.end_ns - one.start_ns
    )
    x, y, width, _ = box(page)
    length = state(page)["to"]
    share = ((longest.start_ns + longest.end_ns) / 2 - step.begin_ns) / length
    lane = step.program.ranks.index(longest.rank)
    at = x + LEFT + share * (width - LEFT - RIGHT), y + 6 + 46 * (lane + 0.5)
    page.mouse("mouseMoved", *at)
    page.settle()
    text = page.evaluate("document.getElementById('tip').innerText")
    assert f"rank {longest.rank} waits " in text
    assert f" for {longest.waits_for}" in text
    assert str(longest.cause).replace("_", " ") in text
    page.mouse("mouseMoved", x + 5, y - 20)
    page.settle()
    assert page.evaluate("document.getElementById('tip').hidden")


def test_another_step_and_another_pipeline_can_be_chosen(page, recorded):
    choose = """(number, row) => {
        const select = document.querySelectorAll('.choice select')[number];
        select.selectedIndex = row;
        select.dispatchEvent(new Event('change'));
    }"""
    second = recorded.ledger.steps[1]
    page.evaluate(f"({choose})(1, 1)")
    page.settle()
    assert state(page)["to"] == int(second.times.pass_end.max())
    shown = (
        "[...document.querySelectorAll('[data-pipeline]')].map(p => [p.dataset.pipeline, p.hidden])"
    )
    assert {(number, hidden) for number, hidden in page.evaluate(shown)} == {
        ("0", False),
        ("1", True),
    }
    page.evaluate(f"({choose})(0, 1)")
    page.settle()
    assert ["1", False] in page.evaluate(shown)
    assert ["0", True] in page.evaluate(shown)
    assert state(page)["to"] == int(recorded.ledger.steps[0].times.pass_end.max())


def test_dark_follows_the_system_and_the_button_overrules_it(page):
    def ground():
        x, y, *_ = box(page)
        return pixels(page, (x + 2, y + 2, 4, 2))[0, 0].tolist()

    assert ground() == rgb(LIGHT["ground"]).tolist()
    page.prefer("dark")
    assert ground() == rgb(DARK["ground"]).tolist()
    page.evaluate("document.getElementById('theme').click()")
    page.settle()
    assert ground() == rgb(LIGHT["ground"]).tolist()
    page.prefer("light")
    page.evaluate("document.getElementById('theme').click()")
    page.settle()
    assert ground() == rgb(DARK["ground"]).tolist()
    assert page.complaints() == []


@pytest.mark.parametrize(
    "command",
    [
        "plan tests/data/h200/1f1b_p3_m7",
        "compare tests/data/h200/1f1b_p2_m4 tests/data/h200/1f1b_p2_m4",
        "find tests/data/h200/fwd_closed_m4",
    ],
)
def test_every_report_loads_without_a_complaint(browser, command, tmp_path):
    type_command(f"debubble {command} --html out.html", tmp_path)
    browser.open(tmp_path / "out.html")
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "out.html").as_uri()]
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.evaluate(wide)


NASTY = "</script><script>window.ran = 1</script>'\"<img src=x onerror='window.ran = 2'>"


def test_names_of_strangers_run_nothing(browser, tmp_path):
    """Kernels, the folder and a file that is no trace are called so."""
    folder = tmp_path / "<img src=x onerror='window.ran = 3'>\"'"
    folder.mkdir()
    for file in sorted((H200 / "1f1b_p2_m4").glob("*.json.gz")):
        content = json.loads(gzip.decompress(file.read_bytes()))
        for event in content["traceEvents"]:
            if event.get("cat") == "kernel":
                event["name"] += NASTY
        (folder / file.name).write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    (folder / "<svg onload='window.ran = 4'>.json").write_text("{}")
    quoted = json.dumps(folder.name)
    answer = type_command(f"debubble find {quoted} --html out.html", tmp_path)
    assert answer.code == 0, answer.text
    browser.open(tmp_path / "out.html")
    assert browser.evaluate("window.ran === undefined")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert "<img src=x onerror=" in browser.evaluate("document.querySelector('header').innerText")
    assert browser.complaints() == []
    assert state(browser)["mode"] == "exact"

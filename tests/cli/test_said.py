"""What is typed has an effect, or is refused: nothing is ignored without a word."""

from __future__ import annotations

import pytest
from support.services.console import type_command

H200 = "tests/data/h200"
LOG = "tests/data/links/sendrecv_2ranks.txt"


def said(words, folder):
    answer = type_command(f"debubble {words}", folder)
    return answer.code, answer.text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (f"links {LOG} --pipeline 0", "--pipeline is about traces"),
        (f"links {LOG} --capture a", "--capture is about traces"),
        (f"links {LOG} --class 0:1=nvlink4 --class 1:0=pcie5", "--class says nvlink4 and pcie5"),
        (f"links {LOG} --class nvlink4 --class pcie5", "--class says nvlink4 and pcie5"),
        (f"find {H200}/1f1b_p2_m4 --html a --svg ./a", "--html and --svg both name ./a"),
        (f"find {H200}/1f1b_p2_m4 --perfetto a --svg a", "--perfetto and --svg both name a"),
        (f"history add {H200}/1f1b_p2_m4 --name ' ' --store sqlite:///a.db", "a name is a word"),
    ],
)
def test_it_is_refused(words, error, tmp_path):
    code, text = said(words, tmp_path)
    assert text.startswith(f"error: {error}")
    assert code == 2


def test_layers_unlike_those_of_the_kernels_are_a_warning(tmp_path):
    words = f"simulate {H200}/fwd_closed_m4 --layers"
    code, text = said(f"{words} 5,3,4,4", tmp_path)
    assert "warning: --layers says 5,3,4,4, and the traces show 4,4,4,4" in text
    assert code == 0
    assert "warning: --layers" not in said(f"{words} 4,4,4,4", tmp_path)[1]


def test_numbers_may_have_an_exponent(tmp_path):
    plain = said("simulate --stages 4 --microbatches 8 --transfer 1000 --forward 2000", tmp_path)
    typed = said("simulate --stages 4 --microbatches 8 --transfer 1e3 --forward 2E+3", tmp_path)
    assert plain[0] == typed[0] == 0
    assert plain[1].partition("next:")[0] == typed[1].partition("next:")[0]
    code, text = said("simulate --stages 4 --microbatches 8 --transfer 1e400", tmp_path)
    assert (code, text[:18]) == (2, "error: '1e400' is ")
    code, text = said("simulate --stages 4 --microbatches 8 --transfer 1e30", tmp_path)
    assert (code, text[:34]) == (2, "error: a value of --transfer is to")


def test_what_would_take_minutes_is_refused_with_the_limit(tmp_path):
    code, text = said("simulate --stages 100000 --microbatches 1", tmp_path)
    assert text.startswith("error: 100,000 ranks and 1 microbatch are more than can be simulated")
    assert "there may be 2,048 ranks" in text
    assert code == 2
    code, text = said(f"simulate {H200}/1f1b_p2_m4 --microbatches 100000", tmp_path)
    assert text.startswith("error: 100,000 microbatches on 2 stages are more than can be simulated")
    assert "stages x microbatches may be 50,000" in text
    assert code == 2


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
@pytest.mark.parametrize(
    ("words", "content"),
    [
        ("watch --config deep --check", 'store = {}\n[[source]]\nname = "a"\nfolder = "."\n'),
        ("watch --config deep --check", "{} = 5"),
        ("links deep.json", '{{"schema": "debubble.links.measured/1", "pairs": {}}}'),
        ("links deep.json", '{{"results": {}}}'),
        ("compare deep.json deep.json", '{{"total_input_tokens": {}}}'),
        ("probe deep.json", '{{"schema": "debubble.probe.measured/1", "x": {}}}'),
        ("find deep.json", '{{"traceEvents": {}}}'),
        ("inspect deep.json", "{}"),
        ("tune --out deep --dry-run -- true", '{{"heading": {}}}'),
    ],
)
def test_brackets_nested_deep_are_an_error_with_a_hint(words, content, depth, tmp_path):
    name = words.partition(" deep")[2].partition(" ")[0]
    file = tmp_path / f"deep{name}" if "tune" not in words else tmp_path / "deep" / "journal.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content.format("[" * depth + "]" * depth) + "\n", "utf-8")
    code, text = said(words, tmp_path)
    assert code == 2
    assert "error: " in text
    assert "unforeseen" not in text
    assert "\nhint: " in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            f"plan {H200}/1f1b_p2_m4 --memory-limit 80",
            "'80' has no unit",
        ),
        (f"simulate {H200}/1f1b_p2_m4 --memory-limit 1.5", "'1.5' has no unit"),
        ("insepct x", "there is no verb 'insepct'; did you mean inspect?"),
        ("xyzzy x", "there is no verb 'xyzzy'\n"),
    ],
)
def test_what_was_mistyped_is_told_with_what_was_meant(words, error, tmp_path):
    code, text = said(words, tmp_path)
    assert code == 2
    assert f"error: {error}" in text


def test_a_plan_that_gives_up_names_the_verb_that_still_prices(tmp_path):
    run = "tests/data/paced/1f1b_m8_slow01"
    code, text = said(f"plan {run} --schedule zb-h2", tmp_path)
    assert code == 0
    assert text.startswith("Repair all slow hops of rank 1, 0:1 and 2:1: +8 %")
    assert " throughput by replay, " in text
    assert "Simulator error 15 % (limit 5 %): " in " ".join(text.split())
    assert f"\nnext: debubble find {run}\n" in text
    code, text = said(f"plan {run} --schedule zb-h2 --html page.html --force", tmp_path)
    assert (code, (tmp_path / "page.html").is_file()) == (0, True)
    code, text = said(f"plan {run} --schedule zb-h2 --emit torch", tmp_path)
    assert "options priced by replay are not settings of a framework" in " ".join(text.split())

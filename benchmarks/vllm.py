"""What is said of captures of vLLM, against counts of their events that share no code with us.

    python benchmarks/vllm.py [--altered] [--tiny] [FOLDER ...]

Each FOLDER holds the traces of one capture. Without any it is the captures of the tests and, unless
`--tiny`, those beside the repository. `--altered` says the same of captures that were cut and
changed: what is said of them may be less, and may be refused, but not be wrong without a word.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.altered_captures import ALTERATIONS, alter
from support.vllm_count import Count

import debubble
from debubble.errors import DebubbleError
from debubble.ledger.causes import Cause
from debubble.report.answers.server_plan import answer_server_plan

OURS = Path(__file__).parents[1] / "tests" / "data" / "vllm"
SHARED = Path(__file__).parents[2] / "shared" / "recordings" / "vllm"
# The bars: against the count of kernels, what nobody knows, the replay, a stage's compute.
MOST_BUBBLE_OFF, MOST_UNEXPLAINED, MOST_REPLAY, MOST_STAGE_OFF = 0.01, 0.05, 0.03, 0.05
MOST_FLIGHT_OFF = 1
# Fewer rounds of what is in flight hold no model of the server: to plan with them is refused.
FEWEST_ROUNDS = 4


def judge(name: str, folder: Path) -> bool:
    """Print what is said of a capture beside the count; tell whether the bars hold."""
    analysis, count = debubble.analyse(folder), Count(folder)
    answer = debubble.find(analysis)
    account = analysis.stream
    if account is None or answer.stream is None or answer.numbers.bubble_fraction is None:
        print(f"{name:24s} no stream: {answer.verdict}")
        return False
    bubble, counted = answer.numbers.bubble_fraction, count.bubble()
    unexplained, replay = account.shares()[Cause.UNEXPLAINED], account.replay_error
    phases = {part.phase: part.batches for part in answer.stream.phases}
    told = account.batches.tokens.tolist()
    tokens = [size for size in count.tokens() if size][: len(told)]
    decode = next((part for part in answer.stream.phases if part.phase == "decode"), None)
    computes = [time * 1000 for time in decode.device_s] if decode else []
    off = [abs(a / b - 1) for a, b in zip(computes, count.compute_ms(), strict=True)]
    first = answer.named[0] if answer.named else None
    print(
        f"{name:24s} bubble {bubble:6.1%} counted {counted:6.1%}; unexplained {unexplained:5.1%}; "
        f"replay {replay or 0:+6.1%}; in flight {answer.stream.batches_in_flight} counted "
        f"{count.in_flight():g}; layers {[stage.layers for stage in answer.stages]} of "
        f"{answer.run.framework.name if answer.run.framework else None}; {phases} counted "
        f"{dict(count.phases())}; {sum(a == b for a, b in zip(told, tokens, strict=False))} of "
        f"{len(tokens)} sizes; stages {[round(time, 2) for time in computes]} ms, at most "
        f"{max(off, default=1):.1%} off; first: {first.cause if first else '-'}"
        f"{f' of stage {first.stage}' if first and first.stage is not None else ''}"
    )
    try:
        plan = answer_server_plan(analysis, analysis.plan_server())
        print(f"{'':24s} plan: {plan.verdict}")
        planned = True
    except DebubbleError as error:
        planned = len(tokens) < FEWEST_ROUNDS * count.in_flight()
        print(f"{'':24s} plan: {'refused, as it must be' if planned else 'refused'}: {error}")
    return (
        planned
        and abs(bubble - counted) <= MOST_BUBBLE_OFF
        and unexplained <= MOST_UNEXPLAINED
        and replay is not None
        and abs(replay) <= MOST_REPLAY
        and abs((answer.stream.batches_in_flight or 0) - count.in_flight()) <= MOST_FLIGHT_OFF
        and max(off, default=1.0) <= MOST_STAGE_OFF
        and told[: len(tokens)] == tokens
        and phases.keys() == count.phases().keys()
    )


def altered(run: Path) -> None:
    """Say what is said of a capture that was cut or changed."""
    for name, change in ALTERATIONS.items():
        with TemporaryDirectory() as place:
            alter(run, change, Path(place))
            print(f"-- {run.name}, {name}")
            try:
                analysis = debubble.analyse(place)
                answer = debubble.find(analysis)
            except DebubbleError as error:
                print(f"   refused: {error}")
                continue
            account, bubble = analysis.stream, answer.numbers.bubble_fraction
            print(f"   {answer.verdict}")
            if account is not None and bubble is not None:
                wait = Count(place).bubble()
                print(
                    f"   bubble {bubble:.1%} counted {wait:.1%}; unexplained "
                    f"{account.shares()[Cause.UNEXPLAINED]:.1%}; replay "
                    f"{account.replay_error or 0:+.1%}; phases labelled "
                    f"{account.batches.labelled}; first "
                    f"{answer.named[0].cause if answer.named else '-'}; "
                    f"{[(part.phase, part.batches) for part in answer.stream.phases]}"
                )
            print(f"   warnings {[gap.code for gap in answer.warnings]}")
            try:
                plan = answer_server_plan(analysis, analysis.plan_server())
                print(f"   plan: {plan.verdict}")
            except DebubbleError as error:
                print(f"   plan: {error}")


def main(words: list[str]) -> int:
    """Judge all captures; or tell what is said of altered ones."""
    folders = [Path(word) for word in words if not word.startswith("--")]
    if not folders:
        beside = SHARED.is_dir() and "--tiny" not in words
        folders = [*OURS.iterdir(), *(SHARED.iterdir() if beside else ())]
    if "--altered" in words:
        for folder in sorted(folders):
            altered(folder)
        return 0
    judged = [judge(f"{folder.parent.name}/{folder.name}", folder) for folder in sorted(folders)]
    print(f"{sum(judged)} of {len(judged)} captures hold all bars")
    return 0 if all(judged) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

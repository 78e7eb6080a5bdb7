"""Follow the skill to the letter: from a bad recorded run to the change that is known to be right.

    python benchmarks/skill.py [--tiny]

Whoever follows it here cannot think: commands are those of `skills/debubble/SKILL.md`, run as they
stand there, and the next one is the first line of its table that holds. A case is right if that
leads to the change that was made when the other run was recorded, and `compare` says what became of
it. `--tiny`: the two cases whose recordings lie in the repository.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from debubble.cli import main as main_of_debubble

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / "skills" / "debubble" / "SKILL.md"
SHARED = ROOT.parent / "shared" / "data"
OWN = ROOT / "tests" / "data"
Told = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bad run, what is wrong with it, and the run in which that was put right."""

    run: Path
    verb: str
    """Where the table must lead."""
    right: str
    leads_to: Callable[[Told], bool]
    after: Path | None = None
    becomes: str = "better"
    missed: str = ""
    """Why it is known to go wrong; it is counted as wrong all the same."""


def offers(**change: object) -> Callable[[Told], bool]:
    """Tell whether a change is among the options that are recommended, as they are ranked."""

    def among(plan: Told) -> bool:
        return any(
            option["recommended"]
            and not option.get("changes_training")
            and change.items() <= option["change"].items()
            for option in plan["options"]
        )

    return among


def names_hops(*hops: list[int]) -> Callable[[Told], bool]:
    """Tell whether these hops are called slow, and no other."""
    return lambda links: (
        sorted([slow["from_rank"], slow["to_rank"]] for slow in links.get("hops", []))
        == sorted(hops)
    )


TINY = [
    Case(
        run=OWN / "paced" / "1f1b_m8_slow12",
        verb="links",
        right="both hops into rank 2",
        leads_to=names_hops([1, 2], [3, 2]),
    ),
    Case(
        run=OWN / "h200" / "1f1b_p3_m7",
        verb="plan",
        right="split 4,4,4",
        leads_to=offers(split=[4, 4, 4]),
    ),
]
RECORDED = [
    Case(
        run=SHARED / "h200" / "1f1b_m8_split3337",
        verb="plan",
        right="split 4,4,4,4",
        leads_to=offers(split=[4, 4, 4, 4]),
        after=SHARED / "h200" / "1f1b_m8",
    ),
    Case(
        run=SHARED / "h200" / "1f1b_m8_split3337",
        verb="plan",
        right="zbv",
        leads_to=offers(schedule="zbv"),
        after=SHARED / "h200" / "zbv_m8",
    ),
    Case(
        run=SHARED / "h200" / "fwd_closed_m8_slow12",
        verb="links",
        right="hop 1 → 2",
        leads_to=names_hops([1, 2]),
        after=SHARED / "h200" / "fwd_closed_m8",
    ),
    Case(
        run=SHARED / "h200" / "1f1b_m8_slow23",
        verb="links",
        right="hop 2 → 3",
        leads_to=names_hops([2, 3]),
        after=SHARED / "h200" / "1f1b_m8",
        becomes="no_clear_change",  # slack hides most of it
    ),
    Case(
        run=SHARED / "h200" / "fwd_closed_m4",
        verb="plan",
        right="8 microbatches",
        leads_to=offers(microbatches=8),
        after=SHARED / "h200" / "fwd_closed_m8",
    ),
    Case(
        run=SHARED / "h200_free" / "a_i1f1b_m8",
        verb="plan",
        right="1f1b",
        leads_to=offers(schedule="1f1b"),
        after=SHARED / "h200_free" / "a_1f1b_m8",
    ),
    Case(
        run=SHARED / "h200_free" / "c_fwd_m6_7333",
        verb="plan",
        right="split 4,4,4,4",
        leads_to=offers(split=[4, 4, 4, 4]),
        after=SHARED / "h200_free" / "c_fwd_m6",
        missed="the plan has it as a maybe: slow transfers hide in six noisy steps what it gains",
    ),
]


def commands(text: str) -> list[str]:
    """Return every command of the skill, of its blocks and of its table."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("debubble")]
    return lines + [command for _, command in rules(text)]


def rules(text: str) -> Iterator[tuple[str, str]]:
    """Yield what must hold, and what is run then, in the order of the table."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[1].startswith("`debubble"):
            yield cells[0], cells[1].strip("`")


def holds(condition: str, found: Told) -> bool:
    """Tell whether a line of the table holds for what `find` said."""
    cause = re.fullmatch(r"`named\[0\]\.cause` is `(\w+)`", condition)
    if cause:
        return bool(found.get("named")) and found["named"][0]["cause"] == cause[1]
    field = re.fullmatch(r"`(\w+)`", condition)
    return bool(found.get(field[1])) if field else condition == "otherwise"


def run(command: str, **places: Path | None) -> Told:
    """Run a command of the skill with real places in it."""
    words = [str(places.get(word.lower()) or word) for word in shlex.split(command)[1:]]
    with redirect_stdout(StringIO()) as out, suppress(SystemExit):
        main_of_debubble(words)
    told: Told = json.loads(out.getvalue())
    return told


def follow(case: Case, text: str) -> tuple[bool, str]:
    """Go through the skill; return whether it led to what is right, and how."""
    every = commands(text)
    look = [
        command for command in every if command.startswith(("debubble inspect", "debubble find"))
    ]
    inspected, found = (run(command, traces=case.run) for command in look[:2])
    if "missing_ranks" in inspected:
        return False, "stops at missing ranks"
    condition, command = next(rule for rule in rules(text) if holds(rule[0], found))
    led = command.split()[1] == case.verb
    answer = run(command, traces=case.run)
    right = led and case.leads_to(answer)
    said = f"{condition} → {command.split()[1]}: {answer['verdict']}"
    if case.after is None:
        return right, said
    [prove] = [command for command in every if command.startswith("debubble compare")]
    proof = run(prove, before=case.run, after=case.after)
    return right and proof["verdict"] == case.becomes, f"{said} After it: {proof['sentence']}"


def main() -> None:
    text = SKILL.read_text("utf-8")
    cases = TINY if "--tiny" in sys.argv else [*TINY, *RECORDED]
    there = [case for case in cases if case.run.exists()]
    right, surprises = 0, 0
    for case in there:
        reached, said = follow(case, text)
        right += reached
        surprises += not reached and not case.missed
        known = f" (known: {case.missed})" if case.missed and not reached else ""
        print(f"{'right' if reached else 'WRONG'}{known}: {case.run.name}, {case.right}. {said}")
    left = f"; {len(cases) - len(there)} without their recording" if len(there) < len(cases) else ""
    print(f"{right} of {len(there)} bad runs led to the right change{left}")
    if surprises:
        sys.exit(1)


if __name__ == "__main__":
    main()

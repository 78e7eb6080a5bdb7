"""A verb's answer in → those of its fields that are acted upon: `--json=brief`, `debubble mcp`.

An agent pays for every byte it reads, a script wants one figure. Names are those of the whole
answer. Of a list there are the first few rows, and `cut` says how many it has; floats have four
digits, sentences an end; what is null or empty is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from debubble.report.answers.base import Answer
from debubble.report.answers.compare import CompareAnswer
from debubble.report.answers.find import FindAnswer
from debubble.report.answers.inspect import InspectAnswer, NoPipelineAnswer
from debubble.report.answers.link_tests import LiveAnswer, LogsAnswer
from debubble.report.answers.links import LinksAnswer
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer, ServerSimulateAnswer
from debubble.report.answers.simulate import SimulateAnswer

# What fits two kilobytes, and what a reader acts upon.
_ROWS, _NUMBERS = 5, 16
_ROWS_OF = {"named": 3, "findings": 3, "warnings": 3, "hops": 3, "refused": 3, "commands": 3}
_LETTERS = 200
_DIGITS = 4

_HOPS = "hops{from_rank to_rank verdict times bytes_per_s cost_per_batch_s}"
_TESTED = f"source batch_latency_s commands {_HOPS}"
_SERVED = """setting as_is misfit_fraction recommended emitted
    options{what verdict gain_fraction low_fraction high_fraction refused
        served{tokens_out_per_s ttft_s tpot_s}}"""
SELECTED: Mapping[type[Answer], str] = {
    InspectAnswer: """capture world_size missing_ranks captures{name}
        ranks{rank device events kernels busy_fraction} lacks{verbs lack record}""",
    NoPipelineAnswer: "run{capture} utilisation{ranks{rank busy_fraction}}",
    FindAnswer: f"""basis
        run{{kind capture ranks stages chunks microbatches schedule missing_ranks
            framework{{name}}}}
        numbers theory utilisation{{apparent_fraction useful_fraction}}
        bottleneck{{sentence}} replicas{{sentence}}
        named{{cause rank stage hop saved_s sentence}}
        ledger{{shares culprits{{cause rank stage pass hop}}}} savings{{cause saved_fraction}}
        {_HOPS}""",
    LinksAnswer: f"basis findings slow_cost_per_batch_s {_TESTED}",
    LogsAnswer: _TESTED,
    LiveAnswer: _TESTED,
    PlanAnswer: """basis findings lower_bound_s emitted tellable_framework
        baseline{schedule split microbatches numbers}
        options{words change advice recommended throughput_gain_fraction interval fits_memory
            changes_training numbers{batch_latency_s}}
        refused{words reason}""",
    ServerPlanAnswer: _SERVED,
    ServerSimulateAnswer: _SERVED,
    SimulateAnswer: """basis findings given{schedule ranks microbatches change} numbers interval
        measured{bubble_fraction batch_latency_s microbatches_per_s} theory
        throughput_gain_fraction fits_memory""",
    CompareAnswer: """basis reasons sentence confidence decided_by samples_needed predicted setting
        delta memory{rank headroom_bytes unsafe}""",
}
"""The fields of each answer, as GraphQL writes them; all have `verdict`, `next` and `warnings`."""
# What comes first of a list, and what of it does not come at all.
_FIRST: Mapping[str, Callable[[Any], Any]] = {
    "options": lambda row: (row.get("changes_training", False), not row.get("recommended")),
    "hops": lambda row: -(row["cost_per_batch_s"] or 0.0),
}
_KEPT: Mapping[str, Callable[[Any], bool]] = {
    "hops": lambda row: row["verdict"] == "slow",
    "memory": lambda row: row["unsafe"],
}


def brief_of(answer: Answer, following: Sequence[str] = ()) -> dict[str, Any]:
    """Return an answer in brief, as plain objects; one that has no brief form is given whole."""
    whole, selected = answer.to_dict(), SELECTED.get(type(answer))
    if selected is None:
        return whole
    cut: dict[str, int] = {}
    brief = {"schema": whole["schema"].replace("/", "-brief/"), "verdict": whole["verdict"]}
    brief |= _select(whole, _parse(selected), cut)
    brief |= {"next": list(following), "warnings": _warnings(whole["warnings"]), "cut": cut}
    return {name: _short(value) for name, value in brief.items() if value}


def _parse(selected: str) -> dict[str, Any]:
    """Read `run{kind steps}` as `{"run": {"kind": {}, "steps": {}}}`."""
    above: list[dict[str, Any]] = [{}]
    name = ""
    for word in re.findall(r"\w+|[{}]", selected):
        if word == "{":
            above.append(above[-1][name])
        elif word == "}":
            above.pop()
        else:
            name = word
            above[-1][name] = {}
    return above[0]


def _select(value: Any, wanted: Mapping[str, Any], cut: dict[str, int], name: str = "") -> Any:
    """Return what is wanted of a value; all of it where nothing is named."""
    if isinstance(value, list):
        rows = [row for row in value if name not in _KEPT or _KEPT[name](row)]
        rows.sort(key=_FIRST.get(name, lambda _row: 0))
        of_numbers = bool(rows) and isinstance(rows[0], int | float)
        most = _NUMBERS if of_numbers else _ROWS_OF.get(name, _ROWS)
        if len(rows) > most:
            cut[name] = len(rows)
        return [_select(row, wanted, cut) for row in rows[:most]]
    if not isinstance(value, dict):
        return value
    parts = {
        field: _select(value.get(field), wanted.get(field, {}), cut, field)
        for field in wanted or value
    }
    # Most causes take no time at all.
    unsaid = (None, "", [], {}, *((0.0,) if name == "shares" else ()))
    return {field: part for field, part in parts.items() if part not in unsaid}


def _warnings(warnings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one warning a code, the first of it, and how many there are; all codes are named."""
    counts = Counter(warning["code"] for warning in warnings)
    first = {warning["code"]: warning for warning in reversed(warnings)}
    return [
        {"code": code, "n": count}
        | ({"message": first[code]["message"]} if rank_of_code < _ROWS_OF["warnings"] else {})
        for rank_of_code, (code, count) in enumerate(counts.items())
    ]


def _short(value: Any) -> Any:
    """Write floats with four digits, and sentences to their end or that of the room."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, str):
        return value if len(value) <= _LETTERS else value[: _LETTERS - 1] + "…"
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value

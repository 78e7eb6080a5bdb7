"""Answers in → their JSON Schemas, as they are shipped beside this file.

`python -m debubble.report.answers.schema` writes them anew; a test holds them against the structs.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from debubble.annexes.probe.answers import ProbeAnswer
from debubble.annexes.tune.answers import DryRunAnswer, TuneAnswer
from debubble.report.answers.base import Answer, ErrorAnswer
from debubble.report.answers.compare import CompareAnswer, HistoryAnswer
from debubble.report.answers.find import FindAnswer
from debubble.report.answers.inspect import InspectAnswer, NoPipelineAnswer
from debubble.report.answers.link_tests import LiveAnswer, LogsAnswer
from debubble.report.answers.links import LinksAnswer
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer, ServerSimulateAnswer
from debubble.report.answers.simulate import SimulateAnswer

ANSWERS: dict[str, type[Answer]] = {
    "inspect": InspectAnswer,
    "find": FindAnswer,
    "find-no-pipeline": NoPipelineAnswer,
    "links": LinksAnswer,
    "links-logs": LogsAnswer,
    "links-measured": LiveAnswer,
    "simulate": SimulateAnswer,
    "simulate-server": ServerSimulateAnswer,
    "plan": PlanAnswer,
    "plan-server": ServerPlanAnswer,
    "probe": ProbeAnswer,
    "compare": CompareAnswer,
    "history": HistoryAnswer,
    "tune": TuneAnswer,
    "tune-dry-run": DryRunAnswer,
    "error": ErrorAnswer,
}
FOLDER = Path(__file__).parent / "schemas"


def schema_of(verb: str) -> str:
    """Return the JSON Schema of a verb's answer, as it is shipped."""
    return json.dumps(msgspec.json.schema(ANSWERS[verb]), indent=1, sort_keys=True) + "\n"


def write_schemas(folder: Path = FOLDER) -> None:
    """Write the schema of every answer into a folder."""
    folder.mkdir(exist_ok=True)
    for verb in ANSWERS:
        (folder / f"{verb}.json").write_text(schema_of(verb), "utf-8")


if __name__ == "__main__":
    write_schemas()

"""Every recording that figures are held on, and all that the verbs say of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from support.traces.recordings import DATA, PUBLIC, SHARED

import debubble
from debubble.analysis import Analysis
from debubble.errors import DebubbleError
from debubble.report.answers.find import FindAnswer
from debubble.report.answers.links import LinksAnswer
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer, answer_server_plan

ROOT = SHARED.parent
FOLDERS = (
    *((DATA, folder) for folder in ("h200", "paced", "frameworks", "serving")),
    *((SHARED, folder) for folder in ("h200", "h200_free", "frameworks", "serving")),
    *((ROOT / "recordings", folder) for folder in ("frameworks", "vllm")),
)
TABLES = (
    "bytedance-straggler-AR",
    "bytedance-straggler-ST",
    "primus-pp_vis/pp8",
    "primus-pp_vis/pp8_vpp2",
)


def every_recording() -> dict[str, Path]:
    """Return the recordings that are here by a name of their own."""
    found = {}
    for root, folder in FOLDERS:
        for run in sorted((root / folder).glob("*/")):
            if any(run.glob("rank*")):
                found[f"{folder}-{run.name}"] = run
    for table in TABLES:
        if (PUBLIC / table).is_dir():
            found[table.replace("/", "-")] = PUBLIC / table
    return found


@dataclass(frozen=True)
class Answers:
    """What the verbs say of one recording: one analysis, asked by all of them."""

    name: str
    folder: Path

    @cached_property
    def analysis(self) -> Analysis:
        return debubble.analyse(self.folder)

    @cached_property
    def find(self) -> FindAnswer:
        return debubble.find(self.analysis)

    @cached_property
    def links(self) -> LinksAnswer:
        return debubble.links(self.analysis)

    @cached_property
    def plan(self) -> PlanAnswer | ServerPlanAnswer | DebubbleError:
        """What `plan` says, or why it cannot."""
        try:
            if self.analysis.pipeline.kind == "stream":
                return answer_server_plan(self.analysis, self.analysis.plan_server())
            return debubble.plan(self.analysis, frameworks=())
        except DebubbleError as error:
            return error

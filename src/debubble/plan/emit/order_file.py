"""csv: the order of passes as a file, which torchtitan and torch's runtime load."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of, cannot, microbatches_of, schedule_of
from debubble.simulate.communication import Post, Result, lower_for_runtime, wire_up
from debubble.timeline.schedules import Order, format_order, order_of, parse_order


def emit(change: Change, setting: Setting) -> str:
    """Write the order of a change that is an order and nothing else."""
    if change.split is not None:
        raise cannot("an order of passes", "a split", "write it for the framework that you run")
    if change.overlap is not None:
        raise cannot(
            "an order of passes",
            "how messages travel",
            "write it for the framework that you run",
        )
    return order_text(change, setting)


def order_text(change: Change, setting: Setting) -> str:
    """Write the order of passes of any change; whatever else it changes is no part of it."""
    aim = aim_of(change, setting, layers_matter=False)
    schedule = schedule_of(aim)
    if aim.order is not None:
        return format_order(aim.order)
    return format_order(order_of(schedule, aim.ranks, microbatches_of(aim), aim.chunks))


def order_beside(text: str, change: Change, setting: Setting) -> str | None:
    """Return the order of passes that a text names the file of; None where it names none."""
    return order_text(change, setting) if say_order(setting) in text else None


def say_order(setting: Setting) -> str:
    """Say in a comment what the file is."""
    return f"{setting.order_file}: the order of passes, written by `plan --emit` (-o names it)."


def emit_with_messages(change: Change, setting: Setting) -> str:
    """Write the order of a change with all that is sent and received, as torch would add it."""
    return format_with_messages(parse_order(emit(change, setting)))


def format_with_messages(order: Order) -> str:
    """Write an order with its messages: `_load_csv(FILE, format="compute_comms")` takes it."""
    lines = []
    for program in lower_for_runtime(wire_up(order)):
        cells: list[str] = []
        passes = [action for step in program if isinstance(step, tuple) for action in step]
        # Its gradients are scaled, and reduced, after the last of a stage's backward passes.
        last = {action.stage: action for action in passes if action.kind in "BW"}
        due: list[str] = []
        for step in program:
            if isinstance(step, Post):
                cells += [_say(result, "SEND") for result in step.sends]
                cells += [_say(result, "RECV") for result in step.receives]
                continue
            cells += due
            pair = f"({step[0]};{step[-1]})OVERLAP_F_B"
            cells.append(str(step[0]) if len(step) == 1 else pair)
            due = [f"{own.stage}REDUCE_GRAD" for own in step if last.get(own.stage) == own]
        cells += due
        lines.append(f"{','.join(cells)}\n")
    return "".join(lines)


def _say(result: Result, way: str) -> str:
    """Name a message as torch does: by the stage that sends or receives it."""
    stage = result.stage
    if way == "SEND":
        stage += 1 if result.backward else -1
    return f"{stage}{way}_{'B' if result.backward else 'F'}{result.microbatch}"


POSITION = 100
EMITTERS = {"csv": emit, "csv@messages": emit_with_messages}

"""A plan in → its best option as text that a framework, or an engine that serves, is told."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from debubble.errors import UsageError
from debubble.plan.change import ServingSetting
from debubble.plan.emit import EMITTERS, emit, emit_serving, refusal_of
from debubble.plan.emit.order_file import order_beside
from debubble.plan.plan import Plan
from debubble.plan.server import ServerOption
from debubble.serving.model import ServerModel


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """The best option that a framework can be told, ready to paste."""

    framework: str
    option: int | None = None
    """Its place among all options; null where none can be written."""
    text: str = ""
    order: str | None = None
    """The order of passes as CSV, where the text names a file of it."""
    order_file: str | None = None
    reason: str
    """Why better ones cannot be written, or why none can; empty where the best is written."""


def emit_best(plan: Plan, framework: str, order_file: str | None = None) -> Emitted:
    """Write the best option that a framework can be told: one that is recommended, else a maybe."""
    reason, setting = "", plan.baseline.setting
    if order_file is not None:
        setting = replace(setting, order_file=order_file)
    # An order that was looked for is what is wanted, if it was found.
    searched = () if plan.ordered is None else (plan.ordered.option,)
    remedy = () if plan.remedy is None else (plan.remedy,)
    options = (*searched, *plan.recommended, *remedy, *plan.to_try)
    for option in options:
        if plan.changes_training(option) or option.by_replay:
            continue
        try:
            text = emit(framework, option.change, setting)
        except UsageError as error:
            reason = reason or error.message
            continue
        order = order_beside(text, option.change, setting)
        return Emitted(
            framework=framework,
            option=plan.options.index(option),
            text=text,
            order=order,
            order_file=None if order is None else setting.order_file,
            reason=reason,
        )
    if not reason:
        reason = "no option gains more than the noise"
        if not plan.options and plan.left_out:
            reason = plan.left_out[0].reason
        elif any(option.by_replay for option in options):
            reason = "options priced by replay are not settings of a framework"
        elif options:
            reason = "no option gains at this global batch size; --hold microbatch lets it grow"
    return Emitted(framework=framework, reason=reason)


def framework_to_tell(plan: Plan) -> str | None:
    """Return who can be told the first option: the run's framework, else the first that can."""
    option = plan.first
    if option is None or option.by_replay:
        return None
    change, setting = option.change, plan.baseline.setting
    every = (plan.framework or plan.baseline.framework or "torch", *EMITTERS)
    return next((name for name in every if refusal_of(name, change, setting) is None), None)


def emit_best_setting(
    model: ServerModel, options: tuple[ServerOption, ...], engine: str
) -> Emitted:
    """Write the best setting that gains and that an engine can be told."""
    reason = ""
    gains = [option for option in options if option.verdict in {"yes", "try", "maybe"}]
    for option in gains:
        setting = option.setting
        if option.kinds == ("hop",):
            reason = reason or "repairing a hop is not a setting of an engine"
            continue
        layers = setting.layers or model.costs.layers
        wanted = ServingSetting(
            stages=model.costs.stages,
            layers=layers if "split" in option.kinds else None,
            in_flight=setting.in_flight if "in_flight" in option.kinds else None,
            chunk=setting.chunk if "chunk" in option.kinds else None,
            requests_a_batch=setting.requests_a_batch if "requests" in option.kinds else None,
            answers_a_batch=-(-model.traffic.clients // setting.in_flight),
        )
        try:
            text = emit_serving(engine, wanted)
        except UsageError as error:
            reason = reason or error.message
            continue
        number = options.index(option)
        return Emitted(framework=engine, option=number, text=text, reason=reason)
    return Emitted(framework=engine, reason=reason or "no option gains")

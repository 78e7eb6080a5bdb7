"""A captured server in → what it would do with another setting, or other traffic, ranked."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from debubble.analysis import Analysis
from debubble.measure.worth import Rates, Tariff, Worth
from debubble.plan.emitted import Emitted, emit_best_setting
from debubble.plan.server import ServerOption, ServerPlan
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.report.answers.serving import answer_scheduler
from debubble.serving.model import WITHOUT_PROFILER, ServerModel
from debubble.serving.traffic import ServerRates, Setting, Traffic
from debubble.units import (
    counted,
    show_gain,
    show_gains,
    show_number,
    show_percent,
    show_seconds,
)

PLAN_SCHEMA = "debubble.plan-server/1"
SIMULATE_SCHEMA = "debubble.simulate-server/1"


class ServedPart(Part, frozen=True, kw_only=True):
    """Throughput and latency of a server."""

    batches_per_s: float
    tokens_out_per_s: float
    tokens_in_per_s: float
    ttft_s: float | None
    """Null, like `kv_tokens`, where no prompt was captured or stated."""
    tpot_s: float
    kv_tokens: int | None


class SettingPart(Part, frozen=True, kw_only=True):
    """How it runs its batches."""

    in_flight: int
    chunk: int
    layers: list[int] | None
    requests_a_batch: int | None
    repaired_hops: list[list[int]]
    """Stages of each slow hop that is to be as quick as the others."""


class TrafficPart(Part, frozen=True, kw_only=True):
    """The load of the server."""

    clients: int
    prompts: list[list[float]]
    """Length and share of each."""
    output: int


class ServerOptionPart(Part, frozen=True, kw_only=True):
    """One change, and what it would do."""

    what: str
    kinds: list[str]
    setting: SettingPart
    traffic: TrafficPart
    served: ServedPart
    gain_fraction: Annotated[float, "gain"]
    """Of tokens/s out; the two below are its 80 % interval."""
    low_fraction: float
    high_fraction: float
    tpot_low_s: float
    """The 80 % interval of the time per token, with the next one."""
    tpot_high_s: float
    worth: Worth | None
    """What it saves per day, for the same tokens; null where no GPU is known."""
    verdict: str
    refused: str


class ServerPlanAnswer(Answer, frozen=True, kw_only=True):
    """What a server does now, and with each change; the most tokens/s first."""

    schema: str = PLAN_SCHEMA
    setting: SettingPart
    traffic: TrafficPart
    as_is: ServedPart
    rates: Rates | None
    """What the worth of options is counted by; null where no GPU is known."""
    misfit_fraction: float
    """How far the model is from what was measured."""
    profiled: bool
    """All figures are profiled: the overhead is unknown."""
    options: list[ServerOptionPart]
    recommended: int | None
    emitted: Emitted | None
    assumptions: list[str]
    verdict: str
    warnings: list[AnswerWarning]


class ServerSimulateAnswer(ServerPlanAnswer, frozen=True, kw_only=True):
    """The same of the one change that was asked for."""

    schema: str = SIMULATE_SCHEMA


_Answer = TypeVar("_Answer", bound=ServerPlanAnswer)


def answer_server_plan(
    analysis: Analysis,
    plan: ServerPlan,
    emit_for: str | None = None,
    tariff: Tariff | None = None,
) -> ServerPlanAnswer:
    """Rank what could be changed in a server."""
    model, options, as_it_is = plan.model, plan.options, _as_it_is(plan.model)
    first, best = plan.first, None
    if first is not None and first.verdict == "yes":
        best = options.index(first)
        verdict = f"{as_it_is}; {_say(model, first)}."
    elif first is not None:
        gain = show_gain(first.gain, first.low - 1, first.high - 1)
        alone = "" if first.of_prompts else " (decode only)"
        why = f"its 80 % interval starts at {show_percent(first.low - 1)}"
        if first.low > 1:
            why = "no prompt was captured"
        verdict = f"{as_it_is}; try {_what(model, first)}: {gain} tokens/s{alone}; not sure: {why}."
    else:
        scheduler = answer_scheduler(analysis)
        notes = scheduler.notes[:1] if scheduler else []
        verdict = "; ".join((f"{as_it_is}: no predicted change gains more than the noise", *notes))
        verdict = f"{verdict}."
    answer = _answer(ServerPlanAnswer, analysis, plan, verdict, tariff)
    emitted = None if emit_for is None else emit_best_setting(model, options, emit_for)
    return msgspec.structs.replace(answer, recommended=best, emitted=emitted)


def answer_server_simulate(analysis: Analysis, plan: ServerPlan) -> ServerSimulateAnswer:
    """Say what one change, or several at once, would do."""
    more = "".join(f"; {_say(plan.model, option)}" for option in plan.options)
    verdict = f"{_as_it_is(plan.model)}{more}."
    return _answer(ServerSimulateAnswer, analysis, plan, verdict, None)


def _answer(
    kind: type[_Answer], analysis: Analysis, plan: ServerPlan, verdict: str, tariff: Tariff | None
) -> _Answer:
    model, rates = plan.model, analysis.rates(tariff)
    return kind(
        rates=rates,
        setting=_setting_part(model.setting, model),
        traffic=_traffic_part(model.traffic),
        as_is=_served_part(model.as_is, model.traffic),
        misfit_fraction=model.off,
        profiled=model.profiled,
        options=[
            ServerOptionPart.of(
                option,
                what=_what(model, option),
                setting=_setting_part(option.setting, model),
                traffic=_traffic_part(option.traffic),
                served=_served_part(option.served, option.traffic),
                low_fraction=option.low - 1,
                high_fraction=option.high - 1,
                tpot_low_s=option.tpot_s[0],
                tpot_high_s=option.tpot_s[1],
                worth=rates.worth_of_gain(option.gain) if rates else None,
            )
            for option in plan.options
        ],
        recommended=None,
        emitted=None,
        assumptions=_assumptions(analysis, plan),
        verdict=verdict,
        warnings=list_warnings(analysis.warnings),
    )


def _setting_part(setting: Setting, model: ServerModel) -> SettingPart:
    layers = setting.layers or model.costs.layers
    return SettingPart.of(
        setting,
        layers=list(layers) if layers else None,
        repaired_hops=[[stage - 1, stage] for stage in setting.repaired],
    )


def _traffic_part(traffic: Traffic) -> TrafficPart:
    prompts = [[float(length), share] for length, share in traffic.prompts]
    return TrafficPart.of(traffic, prompts=prompts)


def _served_part(served: ServerRates, traffic: Traffic) -> ServedPart:
    of_prompts = {} if traffic.prompt > 0 else {"ttft_s": None, "kv_tokens": None}
    return ServedPart.of(served, **of_prompts)


def _what(model: ServerModel, option: ServerOption) -> str:
    """Say a change in words."""
    setting, parts = option.setting, []
    if "in_flight" in option.kinds:
        parts.append(f"{counted(setting.in_flight, 'batch', 'batches')} in flight")
    if "split" in option.kinds and setting.layers:
        parts.append(f"layers {','.join(map(str, setting.layers))}")
    if "chunk" in option.kinds:
        parts.append(f"chunks of {setting.chunk}")
    if "requests" in option.kinds:
        parts.append(f"{counted(setting.requests_a_batch or 0, 'request')} a batch")
    if "hop" in option.kinds:
        hops = " and ".join(f"{stage - 1} → {stage}" for stage in setting.repaired)
        parts.append(f"hop {hops} as fast as its peers")
    if "prompts" in option.kinds:
        mix = option.traffic.prompts
        lengths = ", ".join(
            f"{length}" if len(mix) == 1 else f"{length} ({show_percent(share)})"
            for length, share in mix
        )
        parts.append(f"prompts of {lengths} tokens")
    return " and ".join(parts) or f"{model.setting.in_flight} in flight, unchanged"


def _as_it_is(model: ServerModel) -> str:
    rate = f"{show_number(model.as_is.tokens_out_per_s)} tokens/s out"
    under = " (profiled)" if model.profiled else ""
    return f"The server gives {rate}{under}, TPOT {show_seconds(model.as_is.tpot_s)}"


def _say(model: ServerModel, option: ServerOption) -> str:
    what = _what(model, option)
    if option.refused:
        return f"{what} is refused: {option.refused}"
    served = option.served
    return (
        f"with {what} it would give {show_number(served.tokens_out_per_s)} "
        f"({show_gain(option.gain)}, 80 % interval "
        f"{show_gains(option.low - 1, option.high - 1)}), TPOT {show_seconds(served.tpot_s)}"
    )


def _assumptions(analysis: Analysis, plan: ServerPlan) -> list[str]:
    """Say what the traces did not tell."""
    model, assumptions = plan.model, []
    scheduler = answer_scheduler(analysis)
    engine = scheduler.notes if scheduler else []
    if model.profiled:
        assumptions.append(
            "profiling overhead unknown: figures are profiled, and intervals allow for hosts up to "
            f"{WITHOUT_PROFILER:.0f} times as fast unprofiled"
        )
    if analysis.stream is not None and analysis.stream.batches.stream.first_sets_pace:
        assumptions.append(
            f"{model.setting.in_flight} batches in flight (the first stage sets the pace, so more "
            "would not show)"
        )
    if any(case.more_in_turn for case in model.others):
        assumptions.append(
            "clients run in lockstep: after a restart they may form one batch more or fewer than "
            f"{model.setting.in_flight}, which alone changes tokens/s; intervals include that"
        )
    now, first = model.costs.layers, plan.first
    layers = first.setting.layers if first else None
    if now and layers and max(layers) > max(now):
        assumptions.append(
            f"stage {layers.index(max(layers))} has memory for the weights and the cache of "
            f"{max(layers)} layers; no stage has more than {max(now)} now"
        )
    if not model.traffic.prompt:
        requests = counted(model.traffic.clients, "request")
        notes = analysis.server_notes
        longer = notes.seconds_for_both if notes else None
        how_long = "longer" if longer is None else f"{longer:.0f} s"
        assumptions.append(
            f"no prompt was captured: {requests}, decode only; TTFT and chunk sizes "
            f"(vLLM: --max-num-batched-tokens) are unknown: capture {how_long}"
        )
        return assumptions + engine
    mix = " and ".join(f"{length}" for length, _ in model.traffic.prompts)
    how = "from the server's metrics" if analysis.server_notes else "from the captured batches"
    assumptions.append(
        f"{counted(model.traffic.clients, 'request')} at once, prompts of {mix} tokens, "
        f"{model.traffic.output} tokens an answer ({how}, or as stated)"
    )
    assumptions.append("closed loop: a finished request is replaced at once")
    return assumptions + engine

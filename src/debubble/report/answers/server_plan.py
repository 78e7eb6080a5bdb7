"""A captured server in → what it would do with another setting, or other traffic, ranked."""

from __future__ import annotations

from typing import ClassVar, TypeVar

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
    """What a server does."""

    batches_per_s: float
    tokens_out_per_s: float
    tokens_in_per_s: float
    ttft_s: float | None
    """This and `kv_tokens` are null where no prompt was captured or stated."""
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
    """What is asked of it."""

    clients: int
    prompts: list[list[float]]
    """Length and share of each."""
    output: int


class ServerOptionPart(Part, frozen=True, kw_only=True):
    """One change, and what it would do."""

    paths: ClassVar = {"gain_fraction": "gain"}

    what: str
    kinds: list[str]
    setting: SettingPart
    traffic: TrafficPart
    served: ServedPart
    gain_fraction: float
    """Of tokens out a second; the two below hold four of five such changes."""
    low_fraction: float
    high_fraction: float
    tpot_low_s: float
    """So does this pair, of the time a token takes."""
    tpot_high_s: float
    worth: Worth | None
    """A day of it, for the same tokens; null where no GPU is known."""
    verdict: str
    refused: str


class ServerPlanAnswer(Answer, frozen=True, kw_only=True):
    """What a server does as it is, and what it would do; the most tokens first."""

    schema: str = PLAN_SCHEMA
    setting: SettingPart
    traffic: TrafficPart
    as_is: ServedPart
    rates: Rates | None
    """What the worth of options is counted by; null where no GPU is known."""
    misfit_fraction: float
    """How far the model is from what was measured."""
    profiled: bool
    """All figures are under the profiler: nothing tells what it costs."""
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
        alone = "" if first.of_prompts else ", counting decode alone"
        why = f"its interval begins at {show_percent(first.low - 1)}"
        if first.low > 1:
            why = "no prompt was captured"
        verdict = f"{as_it_is}; try {_what(model, first)}: {gain} tokens/s{alone}; not sure: {why}."
    else:
        scheduler = answer_scheduler(analysis)
        notes = scheduler.notes[:1] if scheduler else []
        verdict = "; ".join((f"{as_it_is}: no priced change gains more than the noise", *notes))
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
        parts.append(f"hop {hops} as quick as its peers")
    if "prompts" in option.kinds:
        mix = option.traffic.prompts
        told = ", ".join(
            f"{length}" if len(mix) == 1 else f"{length} ({show_percent(share)})"
            for length, share in mix
        )
        parts.append(f"prompts of {told} tokens")
    return " and ".join(parts) or f"{model.setting.in_flight} in flight, as it is"


def _as_it_is(model: ServerModel) -> str:
    rate = f"{show_number(model.as_is.tokens_out_per_s)} tokens/s out"
    under = " under the profiler" if model.profiled else ""
    return f"The server gives {rate}{under}, {show_seconds(model.as_is.tpot_s)} a token"


def _say(model: ServerModel, option: ServerOption) -> str:
    what = _what(model, option)
    if option.refused:
        return f"{what} is refused: {option.refused}"
    served = option.served
    return (
        f"with {what} it would give {show_number(served.tokens_out_per_s)} "
        f"({show_gain(option.gain)}, four of five from "
        f"{show_gains(option.low - 1, option.high - 1)}), {show_seconds(served.tpot_s)} a token"
    )


def _assumptions(analysis: Analysis, plan: ServerPlan) -> list[str]:
    """Say what the traces did not tell."""
    model, found = plan.model, []
    scheduler = answer_scheduler(analysis)
    engine = scheduler.notes if scheduler else []
    if model.profiled:
        found.append(
            "the profiler's own cost is not known: figures are of the captured batches, and "
            f"intervals hold hosts that are up to {WITHOUT_PROFILER:.0f} times as quick without it"
        )
    if analysis.stream is not None and analysis.stream.batches.stream.first_sets_pace:
        found.append(
            f"{model.setting.in_flight} batches in flight: the first stage sets the pace, so that "
            "more do not show; --in-flight-measured states them"
        )
    if any(case.more_in_turn for case in model.others):
        found.append(
            f"after a restart clients in step may come round in one batch more or fewer than "
            f"{model.setting.in_flight}, which alone changes tokens/s by that share: intervals "
            "hold that; answers of different lengths show what a setting does by itself"
        )
    now, first = model.costs.layers, plan.first
    layers = first.setting.layers if first else None
    if now and layers and max(layers) > max(now):
        found.append(
            f"stage {layers.index(max(layers))} has memory for the weights and the cache of "
            f"{max(layers)} layers; no stage has more than {max(now)} now"
        )
    if not model.traffic.prompt:
        requests = counted(model.traffic.clients, "request")
        notes = analysis.server_notes
        longer = notes.seconds_for_both if notes else None
        how_long = "longer" if longer is None else f"{longer:.0f} s"
        found.append(
            f"no prompt was captured: {requests} that decode alone; TTFT, chunks "
            f"(--max-num-batched-tokens of vLLM) and what is best with prompts are not told: "
            f"capture {how_long}"
        )
        return found + engine
    mix = " and ".join(f"{length}" for length, _ in model.traffic.prompts)
    how = "by the server's metrics" if analysis.server_notes else "by the captured batches"
    found.append(
        f"{counted(model.traffic.clients, 'request')} at once, prompts of {mix} tokens, "
        f"{model.traffic.output} tokens an answer ({how}, or as stated)"
    )
    found.append("requests that end are followed by others at once: a closed loop")
    return found + engine

"""Calls of an agent in → verbs as tools of the Model Context Protocol, on the official package.

Tools read and nothing else. They see the folders that they are given, wherever links lead. One
call runs at a time, in a thread, so that a ping is answered while traces are read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    JSONRPCError,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import ValidationError

from debubble import __version__, api
from debubble.analysis import Analysis
from debubble.errors import DebubbleError, Unforeseen, UsageError
from debubble.measure.compare import DEFAULT_THRESHOLD
from debubble.plan.emit import EMITTERS
from debubble.plan.server import ServerQuestion
from debubble.report.answers.base import Answer, answer_error, json_text
from debubble.report.answers.brief import brief_of
from debubble.report.answers.inspect import answer_inspect, answer_no_pipeline
from debubble.report.answers.server_plan import (
    answer_server_plan,
    answer_server_simulate,
)
from debubble.timeline.fleet.survey import Means, NoPipelineIn, inspect_run
from debubble.timeline.schedules import SCHEDULES
from debubble.trace.run import find_run
from debubble.trace.source import is_url

_GLOB = frozenset("*?[")


def _about(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


Places = Annotated[
    list[str], msgspec.Meta(description="Files or folders with traces of one run.", min_length=1)
]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Whole(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every tool takes."""

    whole: Annotated[
        bool, _about("The whole answer, tens of kilobytes, in place of the brief one.")
    ] = False


class OfRun(Whole, kw_only=True, forbid_unknown_fields=True):
    """What every tool takes that is about one run."""

    traces: Places
    capture: Annotated[
        str | None, _about("Which capture, by its name, where there are several.")
    ] = None


class OfPipeline(OfRun, kw_only=True, forbid_unknown_fields=True):
    """The same, of one pipeline of the run."""

    pipeline: Annotated[int | None, _about("One pipeline alone, counted from 0.")] = None


class OfStep(OfPipeline, kw_only=True, forbid_unknown_fields=True):
    """The same, of one step."""

    step: Annotated[int | None, _about("One step alone, by the profiler's number.")] = None


class OfPlan(OfPipeline, kw_only=True, forbid_unknown_fields=True):
    """What `plan` takes."""

    emit: Annotated[
        str | None,
        _about("Write the best option for a framework: torch, megatron, vllm, …"),
    ] = None
    memory_limit_bytes: Annotated[float | None, _about("Of each rank.")] = None
    most_microbatches: Positive | None = None
    hold: Annotated[
        Literal["batch", "microbatch"] | None,
        _about("What keeps its size when microbatches change."),
    ] = None


class OfChange(OfPipeline, kw_only=True, forbid_unknown_fields=True):
    """What `simulate` takes; what is left out stays as it is."""

    microbatches: Positive | None = None
    hold: Literal["batch", "microbatch"] | None = None
    split: Annotated[list[int] | None, _about("Layers of each stage.")] = None
    schedule: Annotated[str | None, _about(f"One of {', '.join(SCHEDULES)}.")] = None
    chunks: Annotated[Positive | None, _about("Stages a rank in that schedule.")] = None
    overlap: Annotated[bool | None, _about("Transfers beside compute.")] = None
    recompute: bool | None = None
    hops: Annotated[list[str], _about("Rates of hops: 2:3=5GB/s.")] = msgspec.field(
        default_factory=list
    )
    tokens: Annotated[str | None, _about("Of a microbatch, 4096, or 2x as many.")] = None
    in_flight: Annotated[Positive | None, _about("Of a server: batches at once.")] = None
    chunk: Annotated[Positive | None, _about("Of a server: prompt tokens a batch.")] = None


class OfTwo(Whole, kw_only=True, forbid_unknown_fields=True):
    """What `compare` takes."""

    before: Places
    after: Places
    threshold: Annotated[float, _about("The smallest change that matters, a fraction.")] = (
        DEFAULT_THRESHOLD
    )


class Folders:
    """The folders that tools may read, and nothing beside them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve(strict=True) for folder in folders]
        for folder in self.folders:
            if not folder.is_dir():
                raise UsageError(f"{folder} is no folder", hint="give the folders with traces")

    def place(self, word: str) -> str:
        """Return where a path of a client leads, if that and all it holds is inside.

        What is not there and what is elsewhere is refused in the same words.
        """
        if is_url(word) or "\0" in word or not word.strip() or _GLOB & set(word):
            raise UsageError(f"{word!r} is no path", hint="give files or folders, no URL or glob")
        for folder in self.folders:
            try:
                found = (folder / word).resolve(strict=True)
            except (OSError, RuntimeError):  # not there; links in a circle
                continue
            if self._holds(found):
                self._check(found if found.is_dir() else found.parent, deep=found.is_dir())
                return str(found)
        served = ", ".join(map(str, self.folders))
        raise UsageError(f"{word!r} is not there", hint=f"what is served: {served}")

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self.folders)

    def _check(self, folder: Path, *, deep: bool) -> None:
        """Refuse a folder with something in it that leads out, or that is no file at all."""
        waiting, seen = [folder], set()
        while waiting:
            here = waiting.pop()
            seen.add(here)
            with os.scandir(here) as entries:
                for entry in entries:
                    try:
                        path = Path(entry.path).resolve(strict=True)
                        kind = path.stat().st_mode
                    except (OSError, RuntimeError):  # a link to nowhere is nothing to be read
                        continue
                    if not self._holds(path) or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                        raise UsageError(
                            f"{entry.path} leads out of the folders that are served",
                            hint="copy the traces into them",
                        )
                    if deep and stat.S_ISDIR(kind) and path not in seen:
                        waiting.append(path)


class Tools:
    """Verbs by name: what each is for, what it takes, and what answers."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.known: dict[str, tuple[str, type[Whole], Callable[[Any], tuple[Answer, str]]]] = {
            "inspect": (
                "What is there? Files, ranks, steps; what is missing or broken.",
                OfRun,
                self._inspect,
            ),
            "find": (
                "Where does the time go? The bubble, its causes, whose they are, what each costs.",
                OfStep,
                self._find,
            ),
            "links": (
                "Is it the wire? Each hop judged, and what slow ones cost the batch.",
                OfPipeline,
                self._links,
            ),
            "plan": (
                "What should change? Options ranked, memory checked; `emit` writes the best one.",
                OfPlan,
                self._plan,
            ),
            "simulate": (
                "What if? One change, or several, of a measured run predicted.",
                OfChange,
                self._simulate,
            ),
            "compare": (
                "Did it work? The run after a change against the one before: one verdict.",
                OfTwo,
                self._compare,
            ),
        }

    def listed(self) -> list[Tool]:
        """Return every tool as `tools/list` has it."""
        return [
            Tool(
                name=name,
                title=f"debubble {name}",
                description=what,
                input_schema=_schema_of(takes),
                annotations=ToolAnnotations(
                    read_only_hint=True,
                    destructive_hint=False,
                    idempotent_hint=True,
                    open_world_hint=False,
                ),
            )
            for name, (what, takes, _) in self.known.items()
        ]

    def call(self, name: str, arguments: Any) -> CallToolResult:
        """Answer as `tools/call` does; what goes wrong is an answer, too."""
        try:
            _, takes, answers = self.known[name]
            asked = msgspec.convert(arguments, takes, strict=True)
            whole, following = answers(asked)
            brief = {} if asked.whole else brief_of(whole, [following] if following else [])
        except msgspec.ValidationError as wrong:
            return _failed(UsageError(str(wrong), hint="see tools/list"))
        except DebubbleError as error:
            return _failed(error)
        except Exception as error:  # noqa: BLE001 (the next question is to be answered all the same)
            unforeseen = Unforeseen(f"unforeseen: {type(error).__name__}: {error}")
            return _failed(unforeseen)
        return _result(brief or whole.to_dict())

    def _analyse(self, asked: OfPipeline, step: int | None = None) -> Analysis:
        return api.analyse(
            [self.folders.place(word) for word in asked.traces],
            capture=asked.capture,
            pipeline=asked.pipeline,
            step=step,
        )

    def _inspect(self, asked: OfRun) -> tuple[Answer, str]:
        places = [self.folders.place(word) for word in asked.traces]
        run = inspect_run(find_run(places, capture=asked.capture), Means())
        answer = answer_inspect(run)
        return answer, _then("find", asked.traces) if answer.holds_pipeline else ""

    def _find(self, asked: OfStep) -> tuple[Answer, str]:
        try:
            answer = api.find(self._analyse(asked, asked.step))
        except NoPipelineIn as why:
            if not why.run.ranks:
                raise
            return answer_no_pipeline(why), ""
        slow = any(hop.verdict == "slow" for hop in answer.hops)
        return answer, _then("links" if slow else "plan", asked.traces)

    def _links(self, asked: OfPipeline) -> tuple[Answer, str]:
        return api.links(self._analyse(asked)), _then("plan", asked.traces)

    def _plan(self, asked: OfPlan) -> tuple[Answer, str]:
        run = self._analyse(asked)
        if run.pipeline.kind == "stream":
            return answer_server_plan(run, run.plan_server(), asked.emit), ""
        answer = api.plan(
            run,
            memory_limit_bytes=asked.memory_limit_bytes,
            most_microbatches=asked.most_microbatches,
            hold=asked.hold,
            emit=asked.emit,
            frameworks=tuple(EMITTERS) if asked.whole else (),
        )
        tell = answer.tellable_framework
        return answer, _then("plan", asked.traces, emit=tell) if tell and not asked.emit else ""

    def _simulate(self, asked: OfChange) -> tuple[Answer, str]:
        if asked.schedule is not None and asked.schedule not in SCHEDULES:
            # On the command line it may be a file.
            raise UsageError(
                f"there is no schedule {asked.schedule!r}", hint=f"one of {', '.join(SCHEDULES)}"
            )
        run = self._analyse(asked)
        if run.pipeline.kind == "stream":
            question = ServerQuestion(
                split=tuple(asked.split) if asked.split else None,
                in_flight=asked.in_flight,
                chunk=asked.chunk,
            )
            return answer_server_simulate(run, run.ask_server(question)), ""
        return (
            api.simulate(
                run,
                microbatches=asked.microbatches,
                hold=asked.hold,
                split=asked.split,
                schedule=asked.schedule,
                chunks=asked.chunks,
                overlap=asked.overlap,
                recompute=asked.recompute,
                hops=asked.hops,
                tokens=asked.tokens,
            ),
            "",
        )

    def _compare(self, asked: OfTwo) -> tuple[Answer, str]:
        sides = [
            [self.folders.place(word) for word in side] for side in (asked.before, asked.after)
        ]
        return api.compare(*sides, threshold=asked.threshold), _then("plan", asked.after)


def build_server(tools: Tools) -> Server:
    """Return a server of the official package that lists and calls the tools."""
    one_at_a_time = anyio.CapacityLimiter(1)

    async def list_tools(
        _context: ServerRequestContext, _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=tools.listed())

    async def call_tool(
        _context: ServerRequestContext, params: CallToolRequestParams
    ) -> CallToolResult:
        if params.name not in tools.known:
            names = ", ".join(tools.known)
            raise MCPError(INVALID_PARAMS, f"no tool {params.name!r}; one of {names}")
        return await anyio.to_thread.run_sync(
            tools.call, params.name, params.arguments or {}, limiter=one_at_a_time
        )

    served = ", ".join(map(str, tools.folders.folders))
    return Server(
        "debubble",
        version=__version__,
        instructions="Finds where a pipeline-parallel PyTorch job waits, why, and what to change. "
        "inspect, find, then links or plan as `next` says; compare proves a change. "
        f"Traces lie in: {served}",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve_stdio(folders: Sequence[Path]) -> None:
    """Answer over stdin and stdout until the client has gone."""
    try:
        anyio.run(_serve_stdio, build_server(Tools(Folders(folders))))
    except* BrokenPipeError:  # it has gone without a word
        pass


async def _serve_stdio(server: Server) -> None:
    async with stdio_server() as (incoming, outgoing):
        well_formed, requests = anyio.create_memory_object_stream[SessionMessage | Exception]()

        async def refuse_malformed() -> None:
            # The package drops what is no JSON-RPC, and whoever sent it waits for ever.
            async with well_formed:
                async for message in incoming:
                    if isinstance(message, Exception):
                        await outgoing.send(SessionMessage(_refusal(message)))
                    else:
                        await well_formed.send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse_malformed)
            await server.run(requests, outgoing, server.create_initialization_options())


def _refusal(error: Exception) -> JSONRPCError:
    """Return the error that answers a line which is no request, with its id where it has one."""
    wrong = error.errors()[-1] if isinstance(error, ValidationError) else None
    if wrong is None or wrong["type"] == "json_invalid":
        refusal, number = ErrorData(code=PARSE_ERROR, message="this is no JSON"), None
    else:
        refusal = ErrorData(code=INVALID_REQUEST, message="this is no request")
        number = wrong["input"].get("id") if isinstance(wrong["input"], dict) else None
    usable = isinstance(number, str | int) and not isinstance(number, bool)
    return JSONRPCError(jsonrpc="2.0", id=number if usable else None, error=refusal)


def _schema_of(takes: type[Whole]) -> dict[str, Any]:
    """Return the JSON Schema of what a tool takes, as one object."""
    _, parts = msgspec.json.schema_components([takes])
    schema = dict(parts[takes.__name__])
    schema.pop("title", None)
    schema.pop("description", None)
    return schema


def _failed(error: DebubbleError) -> CallToolResult:
    return _result(answer_error(error).to_dict(), wrong=True)


def _result(answer: dict[str, Any], *, wrong: bool = False) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=json_text(answer, compact=True))],
        structured_content=answer,
        is_error=wrong,
    )


def _then(tool: str, traces: Sequence[str], **more: Any) -> str:
    """Write a call to go on with."""
    return f"{tool} {json.dumps({'traces': list(traces)} | more)}"

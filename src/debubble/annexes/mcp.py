"""Calls of an agent in → verbs as tools of the Model Context Protocol, on the official package.

A tool is its verb on the command line with `--json`, and takes those of its options that read and
nothing else. Tools see the folders that they are given, wherever links lead. One call runs at a
time, in a thread, so that a ping is answered while traces are read.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import click
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from debubble import __version__
from debubble.cli import VERBS, cli
from debubble.errors import DebubbleError, Unforeseen, UsageError
from debubble.report.answers.base import answer_error, json_text
from debubble.timeline.schedules import SCHEDULES
from debubble.trace.source import is_url

_RUN = ("--capture", "--pipeline")
TOOLS = {
    "inspect": ("--capture",),
    "find": (*_RUN, "--step"),
    "links": _RUN,
    "plan": (*_RUN, "--emit", "--memory-limit", "--max-microbatches", "--hold"),
    "simulate": (
        *(*_RUN, "--microbatches", "--hold", "--split", "--schedule", "--chunks", "--overlap"),
        *("--recompute", "--hop", "--tokens", "--in-flight", "--chunk"),
    ),
    "compare": ("--threshold",),
}
"""Each verb with the options that its tool takes: none of them reads or writes another file."""
# What is no part of a path here: globs, and commas, which join captures for `compare`.
_SPECIAL = frozenset("*?[,\0")


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
        if is_url(word) or not word.strip() or _SPECIAL & set(word):
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
        self.options: dict[str, dict[str, click.Option]] = {}
        for verb, flags in TOOLS.items():
            command = cli.get_command(click.Context(cli), verb)
            if isinstance(command, click.Group):  # alone it reads traces
                command = command.commands["read"]
            known = (
                {option.opts[0]: option for option in command.params if option.opts}
                if command
                else {}
            )
            self.options[verb] = {
                flag.removeprefix("--").replace("-", "_"): option
                for flag in flags
                if isinstance(option := known[flag], click.Option)
            }

    def listed(self) -> list[Tool]:
        """Return every tool as `tools/list` has it."""
        return [
            Tool(
                name=verb,
                title=f"debubble {verb}",
                description=VERBS[verb],
                input_schema=self._schema(verb),
                annotations=ToolAnnotations(
                    read_only_hint=True,
                    destructive_hint=False,
                    idempotent_hint=True,
                    open_world_hint=False,
                ),
            )
            for verb in TOOLS
        ]

    def _schema(self, verb: str) -> dict[str, Any]:
        """Return the JSON Schema of what a tool takes."""
        run = {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "Files or folders with traces of one run.",
        }
        places = dict.fromkeys(_places(verb), run)
        asked = {name: _schema_of(option) for name, option in self.options[verb].items()}
        whole = {"type": "boolean", "description": "The whole answer: tens of kilobytes."}
        return {
            "type": "object",
            "properties": {**places, **asked, "whole": whole},
            "required": list(places),
            "additionalProperties": False,
        }

    def call(self, verb: str, arguments: dict[str, Any]) -> CallToolResult:
        """Answer as `tools/call` does; what goes wrong is an answer, too."""
        printed = io.StringIO()
        try:
            words = self._words(verb, dict(arguments))
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                cli.main(args=words, prog_name="debubble", standalone_mode=False)
            return _result(msgspec.json.decode(printed.getvalue()))
        except click.ClickException as wrong:
            error: DebubbleError = UsageError(wrong.format_message(), hint="see tools/list")
        except DebubbleError as known:
            error = known
        except Exception as unknown:  # noqa: BLE001 (the next question is to be answered all the same)
            error = Unforeseen(f"unforeseen: {type(unknown).__name__}: {unknown}")
        return _result(answer_error(error).to_dict(), wrong=True)

    def _words(self, verb: str, asked: dict[str, Any]) -> list[str]:
        """Write a call as one would type it."""
        places: list[str] = []
        for name in _places(verb):
            words = asked.pop(name, None)
            if not (isinstance(words, list) and words and all(isinstance(it, str) for it in words)):
                raise UsageError(f"{name} must be a list of paths", hint="see tools/list")
            found = [self.folders.place(word) for word in words]
            places += [",".join(found)] if verb == "compare" else found
        typed = [f"--json={'full' if asked.pop('whole', False) else 'brief'}"]
        for name, value in asked.items():
            option = self.options[verb].get(name)
            if option is None:
                raise UsageError(f"{verb} takes no {name}", hint="see tools/list")
            values = value if option.multiple and isinstance(value, list) else [value]
            for each in values:
                if not isinstance(each, str | int | float) or isinstance(each, bool):
                    raise UsageError(f"{each!r} is no value of {name}", hint="see tools/list")
                typed.append(f"{option.opts[0]}={each}")
        schedule = asked.get("schedule", "1f1b")
        if schedule not in SCHEDULES:  # on the command line it may be a file
            hint = f"one of {', '.join(SCHEDULES)}"
            raise UsageError(f"there is no schedule {schedule!r}", hint=hint)
        return [verb, *typed, *places]


def _places(verb: str) -> tuple[str, ...]:
    """Name the arguments that are paths."""
    return ("before", "after") if verb == "compare" else ("traces",)


def _schema_of(option: click.Option) -> dict[str, Any]:
    """Return the JSON Schema of an option."""
    schema: dict[str, Any] = {"type": "string"}
    if isinstance(option.type, click.Choice):
        schema["enum"] = list(option.type.choices)
    elif isinstance(option.type, click.types.IntParamType):
        schema["type"] = "integer"
    if option.multiple:
        schema = {"type": "array", "items": schema}
    return {**schema, "description": option.help or ""}


def _result(answer: dict[str, Any], *, wrong: bool = False) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=json_text(answer, compact=True))],
        structured_content=answer,
        is_error=wrong,
    )


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
        if params.name not in TOOLS:
            names = ", ".join(TOOLS)
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
        await server.run(incoming, outgoing, server.create_initialization_options())

"""`debubble mcp`: driven by the official client; hostile paths and hostile lines get no further."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from support.processes import PATIENCE_S
from support.requirements import need_package
from support.traces.recordings import H200

from debubble.errors import UsageError

mcp = need_package("mcp")

from debubble.annexes.mcp import TOOLS, Folders, Tools, build_server

RUN = "1f1b_p3_m7"


@pytest.fixture(scope="module")
def tools():
    return Tools(Folders([H200]))


def call(tools, name, **arguments):
    result = tools.call(name, arguments)
    [content] = result.content
    assert json.loads(content.text) == result.structured_content
    return result.is_error, result.structured_content


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_goes_from_traces_to_a_change(mode):
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "debubble", "mcp", str(H200)],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    async def drive():
        async with mcp.Client(mcp.stdio_client(server), mode=mode) as client:
            assert str(H200) in client.instructions
            assert [tool.name for tool in (await client.list_tools()).tools] == list(TOOLS)
            name, asked, seen = "inspect", {"traces": [RUN]}, []
            while len(seen) < 4:
                answer = await client.call_tool(name, asked)
                assert not answer.is_error, answer.content[0].text
                seen.append(answer.structured_content)
                if "emitted" in seen[-1]:
                    break
                _, name, *words = shlex.split(seen[-1]["next"][0])
                asked = {"traces": [RUN]}
                if "--emit" in words:
                    asked["emit"] = words[words.index("--emit") + 1]
            compared = await client.call_tool("compare", {"before": [RUN], "after": [RUN]})
            outside = await client.call_tool("find", {"traces": ["../../test_mcp.py"]})
            return seen, compared, outside

    seen, compared, outside = asyncio.run(drive())
    assert [one["schema"].partition("/")[0] for one in seen] == [
        "debubble.inspect-brief",
        "debubble.find-brief",
        "debubble.plan-brief",
        "debubble.plan-brief",
    ]
    assert seen[-1]["emitted"]["text"]
    assert compared.structured_content["verdict"] == "no_clear_change"
    assert outside.is_error


HANDSHAKE = (
    b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18",'
    b'"capabilities":{},"clientInfo":{"name":"raw","version":"0"}}}\n'
    b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n'
)


@pytest.mark.slow
def test_the_line_after_hostile_ones_is_answered():
    hostile = (
        b'{"jsonrpc":"2.0","id":1,"method":5}',
        b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":["find"]}}',
        b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"rm"}}',
        b"no json",
        b"[" * 100_000,
        b"\xff\xfe",
        b"x" * 2_000_000,
        b'{"jsonrpc":"2.0","id":6,"method":"ping"}\n',
    )
    with subprocess.Popen(
        [sys.executable, "-m", "debubble", "mcp", str(H200)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as served:
        served.stdin.write(HANDSHAKE + b"\n".join(hostile))
        served.stdin.flush()
        answered = {}
        for line in served.stdout:
            answer = json.loads(line)
            answered[answer["id"]] = answer
            if answer["id"] == 6:
                break
        served.communicate(timeout=PATIENCE_S)
    assert served.returncode == 0
    assert answered[3]["error"]["code"] == -32602
    assert answered[6]["result"] == {}


def talk(tools, talking):
    """Let the official client talk to the tools, in this process."""

    async def connect():
        async with mcp.Client(build_server(tools), mode="legacy") as client:
            return await talking(client)

    return asyncio.run(connect())


def test_an_unknown_tool_is_refused_with_the_names_there_are(tools):
    async def talking(client):
        with pytest.raises(mcp.MCPError, match="no tool 'rm'; one of inspect, find"):
            await client.call_tool("rm", {})

    talk(tools, talking)


def test_every_tool_says_what_it_takes_and_that_it_only_reads(tools):
    listed = {tool.name: tool for tool in tools.listed()}
    assert list(listed) == list(TOOLS)
    for tool in listed.values():
        assert tool.annotations.read_only_hint
        assert tool.input_schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False
        assert "$ref" not in json.dumps(tool.input_schema)


def test_wrong_arguments_are_told_as_an_answer(tools):
    for arguments in (
        {},
        {"traces": []},
        {"traces": [1]},
        {"traces": [RUN], "engine": "tcp://x:1"},
    ):
        wrong, told = call(tools, "find", **arguments)
        assert wrong
        assert told["error"]["code"] == "usage_error"


@pytest.fixture
def served(tmp_path):
    """A folder that is served, and a secret beside it."""
    (tmp_path / "secret").mkdir()
    shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "secret" / "run")
    (tmp_path / "served").mkdir()
    shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "served" / "run")
    return tmp_path / "served"


@pytest.mark.parametrize(
    "word",
    [
        "../secret/run",
        "run/../../secret/run",
        "{secret}",
        "file://{secret}",
        "s3://bucket/run",
        "~/run",
        "ru*",
        "run\0",
        "",
        " ",
        "/proc/self/environ",
        "nowhere",
    ],
)
def test_a_path_that_leads_out_is_refused(served, word):
    folders = Folders([served])
    with pytest.raises(UsageError):
        folders.place(word.format(secret=served.parent / "secret" / "run"))


def test_what_is_elsewhere_and_what_is_nowhere_are_refused_in_the_same_words(served):
    folders = Folders([served])
    told = []
    for word in (str(served.parent / "secret" / "run"), str(served.parent / "secret" / "no")):
        with pytest.raises(UsageError) as refused:
            folders.place(word)
        told.append(str(refused.value).replace(word, "WORD"))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "link", ["link", "run/rank9.json", "run/rank0.debubble.json", "run/deep/link"]
)
def test_a_link_that_leads_out_is_refused_wherever_it_lies(served, link):
    place = served / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(served.parent / "secret" / "run")
    with pytest.raises(UsageError, match=r"leads out|is not there"):
        Folders([served]).place(link if link == "link" else "run")


def test_a_run_is_the_same_through_the_server_and_not(served):
    wrong, told = call(Tools(Folders([served])), "compare", before=["run"], after=[str(served)])
    assert not wrong
    assert told["verdict"] == "no_clear_change"


def test_a_schedule_is_a_name_and_no_file(tools):
    wrong, told = call(tools, "simulate", traces=[RUN], schedule="/etc/passwd")
    assert wrong
    assert told["error"]["message"] == "there is no schedule '/etc/passwd'"


def test_a_pipe_that_nobody_writes_to_is_refused(served):
    os.mkfifo(served / "run" / "rank7.json")
    with pytest.raises(UsageError, match="leads out"):
        Folders([served]).place("run")

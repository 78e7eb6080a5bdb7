"""`debubble mcp`: driven by the official client; hostile paths and hostile lines get no further."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import sys
import threading

import pytest
from support.requirements import need_package
from support.traces.recordings import H200

from debubble.errors import UsageError
from debubble.mcp import MOST_BYTES, Folders, Server, Tools

TOOLS = ["inspect", "find", "links", "plan", "simulate", "compare"]
RUN = "1f1b_p3_m7"


@pytest.fixture(scope="module")
def tools():
    return Tools(Folders([H200]))


def call(tools, name, **arguments):
    result = tools.call(name, arguments)
    [content] = result["content"]
    assert json.loads(content["text"]) == result["structuredContent"]
    return result["isError"], result["structuredContent"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_goes_from_traces_to_a_change(mode):
    mcp = need_package("mcp")
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "debubble", "mcp", str(H200)],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    async def drive():
        async with mcp.Client(mcp.stdio_client(server), mode=mode) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == TOOLS
            name, asked, seen = "inspect", {"traces": [RUN]}, []
            while len(seen) < 4:
                answer = await client.call_tool(name, asked)
                assert not answer.is_error, answer.content[0].text
                seen.append(answer.structured_content)
                if "emitted" in seen[-1]:
                    break
                name, _, told = seen[-1]["next"][0].partition(" ")
                asked = json.loads(told)
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


def lines(*messages):
    return b"".join(
        message if isinstance(message, bytes) else f"{json.dumps(message)}\n".encode()
        for message in messages
    )


def talk(*messages):
    """Return what is answered at once: calls of tools come later."""
    sink = io.BytesIO()
    Server([H200], io.BytesIO(lines(*messages)), sink).serve()
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def asked(method, number=1, **params):
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [("2025-06-18", "2025-06-18"), ("2024-11-05", "2024-11-05"), ("1999-01-01", "2025-11-25")],
)
def test_a_client_and_the_server_agree_on_a_revision(offered, agreed):
    [answer] = talk(asked("initialize", protocolVersion=offered))
    assert answer["result"]["protocolVersion"] == agreed
    assert str(H200) in answer["result"]["instructions"]


def test_hostile_lines_are_answered_and_the_next_one_as_well():
    answers = talk(
        b"no json\n",
        b"[" * 100_000 + b"\n",
        b"x" * (MOST_BYTES + 10) + b"\n",
        b"\n",
        [1, 2],
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 9, "result": {}},
        asked("resources/list", 2),
        asked("tools/call", 3, name="rm"),
        {"jsonrpc": "2.0", "id": 4, "method": "ping", "params": "none"},
    )
    codes = [answer.get("error", {}).get("code") for answer in answers]
    assert codes == [-32700, -32700, -32600, -32600, -32601, -32602, None]
    assert answers[-1] == {"jsonrpc": "2.0", "id": 4, "result": {}}


def test_a_ping_is_answered_while_traces_are_read():
    reads, sink = os.pipe()
    source, writes = os.pipe()
    with os.fdopen(sink, "wb") as out, os.fdopen(source, "rb") as given:
        server = Server([H200], given, out)
        release = threading.Event()
        server.tools.call = lambda *_: {"content": []} if release.wait() else {}
        serving = threading.Thread(target=server.serve)
        serving.start()
        with os.fdopen(writes, "wb") as client, os.fdopen(reads, "rb") as answers:
            client.write(lines(asked("tools/call", 1, name="find"), asked("ping", 2)))
            client.flush()
            assert json.loads(answers.readline())["id"] == 2
            release.set()
            assert json.loads(answers.readline())["id"] == 1
            client.close()
            serving.join()


def test_a_call_that_was_called_off_is_not_answered():
    server = Server([H200], io.BytesIO(), io.BytesIO())
    server._answer(1, "tools/call", {"name": "find"})
    server._take(
        lines(
            {
                "jsonrpc": "2.0",
                "method": "notifications/cancelled",
                "params": {"requestId": 1},
            }
        )
    )
    assert server.waited_for == set()


def test_every_tool_says_what_it_takes_and_that_it_only_reads(tools):
    listed = {tool["name"]: tool for tool in tools.listed()}
    assert list(listed) == TOOLS
    for tool in listed.values():
        assert tool["annotations"]["readOnlyHint"]
        assert tool["inputSchema"]["type"] == "object"
        assert tool["inputSchema"]["additionalProperties"] is False
        assert "$ref" not in json.dumps(tool["inputSchema"])


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


def test_a_schedule_is_a_name_and_no_file(tools):
    wrong, told = call(tools, "simulate", traces=[RUN], schedule="/etc/passwd")
    assert wrong
    assert told["error"]["message"] == "there is no schedule '/etc/passwd'"


def test_answers_are_brief_unless_the_whole_is_asked_for(tools):
    _, brief = call(tools, "find", traces=[RUN])
    _, whole = call(tools, "find", traces=[RUN], whole=True)
    assert brief["schema"] == "debubble.find-brief/1"
    assert whole["schema"] == "debubble.find/1"
    assert brief["next"] == [f'plan {{"traces": ["{RUN}"]}}']


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


def test_a_pipe_that_nobody_writes_to_is_refused(served):
    os.mkfifo(served / "run" / "rank7.json")
    with pytest.raises(UsageError, match="leads out"):
        Folders([served]).place("run")


def test_links_inside_are_followed_once(served):
    (served / "run" / "again").symlink_to(served)
    (served / "loop").symlink_to(served / "loop")
    folders = Folders([served])
    assert folders.place("run") == str(served / "run")
    assert folders.place(str(served / "run")) == str(served / "run")
    with pytest.raises(UsageError):
        folders.place("loop")


def test_one_file_is_looked_at_with_what_lies_beside_it(served):
    [trace, *_] = sorted((served / "run").glob("*.json*"))
    assert Folders([served]).place(f"run/{trace.name}") == str(trace)
    (served / "run" / "rank0.debubble.json").symlink_to(served.parent / "secret")
    with pytest.raises(UsageError, match="leads out"):
        Folders([served]).place(f"run/{trace.name}")


def test_a_run_is_the_same_through_the_server_and_not(served):
    wrong, told = call(Tools(Folders([served])), "compare", before=["run"], after=[str(served)])
    assert not wrong
    assert told["verdict"] == "no_clear_change"

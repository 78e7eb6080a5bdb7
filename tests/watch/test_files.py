"""The rules and the dashboard ask for metrics that there are."""

from __future__ import annotations

import json
import re

import yaml
from msgspec.structs import fields
from support.services.console import REPOSITORY

from debubble.annexes.watch import config
from debubble.annexes.watch.judge import KINDS
from debubble.annexes.watch.metrics import GAUGES
from debubble.annexes.watch.run import read_file

METRIC = re.compile(r"\bdebubble_\w+")
SUFFIX = re.compile(r"_(?:sum|count|bucket)$")


def documented():
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text("utf-8")
    return set(METRIC.findall(page))


def test_the_rules_know_the_metrics_and_every_kind_that_gets_worse():
    rules = yaml.safe_load(read_file("rules"))["groups"][0]["rules"]
    asked = " ".join(rule["expr"] for rule in rules)
    assert set(METRIC.findall(asked)) <= documented()
    for kind in KINDS:
        assert f'kind="{kind}"' in asked


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads(read_file("dashboard"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {SUFFIX.sub("", name) for expr in asked for name in METRIC.findall(expr)}
    assert names <= documented()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_metric_is_documented():
    assert {f"debubble_{name}" for name in GAUGES} <= documented()


def test_every_key_of_the_configuration_is_documented():
    page = (REPOSITORY / "docs" / "reference" / "watch-config.md").read_text("utf-8")
    tables = config.Table.__subclasses__()
    keys = {field.encode_name for kind in tables for field in fields(kind)}
    assert len(keys) > 18
    for key in keys - {"source", "server", "listen", "drift"}:
        assert re.search(rf"[`.]{key}`", page), key

# Every target sets up what it needs in .venv by itself, from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Compiled modules are kept, whatever the shell says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: release-check help demo demo-watch soak quick test check format lint types imports docs bench bench-peers accuracy fuzz variants clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: debubble needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: asked for by another package, a newer one with its CUDA libraries would come.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install "$$(grep '^torch==' constraints.txt)" --constraint constraints.txt
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install --editable '.[torch]' --constraint constraints.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install --editable '.[dev]' --constraint constraints.txt
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## the whole loop on a real pipeline of this machine: capture, find, plan, change, compare
	$(BIN)/debubble demo --out debubble-demo --force

demo-watch: $(VENV)/.dev ## a real server whose traffic shifts from 512 to 2048 tokens, watched
	$(BIN)/python examples/serve_pipeline/watch_demo.py

soak: $(VENV)/.dev ## 5,000 captures in bursts, 50 times kill -9: none lost, none twice, memory flat
	$(BIN)/python benchmarks/soak_watch.py

quick: $(VENV)/.dev ## the tests to run while working: a minute and a half, no service, no process started
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'not slow and not service and not accuracy'

test: $(VENV)/.dev ## run all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 20

check: $(VENV)/.dev ## what CI runs: what needs one core, two at a time, then the tests
	$(MAKE) --jobs 2 types docs format lint imports
	$(MAKE) test

format: $(VENV)/.dev ## is the code formatted?
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev ## ruff, all rules
	$(BIN)/ruff check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

imports: $(VENV)/.dev ## the import contract of the house
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.dev ## build the documentation; warnings are errors
	$(BIN)/sphinx-build -q -W -E -b html docs docs/_build/html

bench: $(VENV)/.dev ## measure the bars of the reader, of digests and of many ranks, the simulator, the planner, capture and the report, as ratios of one run
	$(BIN)/python benchmarks/read.py
	$(BIN)/python benchmarks/digests.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/html_report.py
	$(BIN)/python benchmarks/watch_readers.py
	$(BIN)/python benchmarks/dask_engine.py
	$(BIN)/python benchmarks/fleet.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/meter.py overhead drift

bench-peers: $(VENV)/.dev ## the same beside HolisticTraceAnalysis, in a venv of its own
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --disable-pip-version-check --quiet install traceinsight==0.6.1
	$(BIN)/python benchmarks/read.py --peer .venv-peers/bin/python

accuracy: $(VENV)/.dev ## recorded GPU runs predicted from each other; real pipelines here, on a quiet machine
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/frameworks.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/vllm.py
	$(BIN)/python benchmarks/follow.py
	$(BIN)/python benchmarks/skill.py
	$(BIN)/python benchmarks/orders.py
	$(BIN)/python benchmarks/probe.py
	$(BIN)/python benchmarks/meter.py accuracy
	$(BIN)/python benchmarks/demo_load.py
	$(BIN)/python -m pytest -m accuracy

release-check: $(VENV)/.dev ## build wheel and sdist, check them, and go from traces to a verdict in an empty environment
	$(PIP) install 'twine>=6'
	$(BIN)/python tools/release_check.py --out dist

fuzz: $(VENV)/.dev ## throw 20,000 mutated traces at the reader
	$(BIN)/python tests/fuzz/fuzz_reader.py --cases 20000

variants: $(VENV)/.dev ## healthy variants of recordings, as other machines and jobs would have made them: none refused, none wrong
	$(BIN)/python tests/variants/judge.py
	$(BIN)/python tests/variants/judge.py --kept-back

clean: ## remove what the targets made
	rm -rf $(VENV) .venv-peers .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
	  docs/_build benchmarks/.data debubble-demo debubble-tune fuzz-findings build dist

# Everything here needs python3, pip and make, and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS_VENV := .venv-bench
PEERS_INSTALLED := $(PEERS_VENV)/.installed
TYPE_PROCESSES ?= 2
TEST_PROCESSES ?= 3
BROWSER_PROCESSES ?= 2

# Images of containers often forbid Python to keep what it compiled. The tests start hundreds of
# processes, and each would compile everything anew, which takes longer than most of them run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run up demo test test-browser explore screenshots sync-client check bench torture package clean

help:
	@echo "make run      install into $(VENV) and run an example workflow, inside a budget"
	@echo "make up       install into $(VENV) and start the service on 127.0.0.1:7420"
	@echo "make demo     the same with simulated agents and a fake provider; nothing is kept"
	@echo "make test     install, then format check, lint, types, layers and tests"
	@echo "make test-browser  drive every page of the dashboard in the system's Chromium"
	@echo "make explore  run the tests of properties with examples that no run has tried yet"
	@echo "make screenshots   draw every page into build/screenshots, and those of the docs anew"
	@echo "make sync-client   write the synchronous client anew from the asynchronous one"
	@echo "make bench    measure; prints ratios against a floor in the same run"
	@echo "make torture  kill processes at random for minutes; nothing may be lost"
	@echo "make package  build the wheel and the source archive, install both, run a task"
	@echo "make clean    remove $(VENV) and caches"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "==> installing into $(VENV) (only when pyproject.toml or constraints.txt changed)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "headgate needs Python 3.11 or newer; set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)
	@$(BIN)/headgate run examples/evaluation/evaluation.yaml

up: $(INSTALLED)
	@$(BIN)/headgate up

demo: $(INSTALLED)
	@$(BIN)/headgate up --demo

check: $(INSTALLED)
	@echo "==> format"
	@$(BIN)/ruff format --check .
	@echo "==> lint"
	@$(BIN)/ruff check .
	@echo "==> types"
	@$(BIN)/mypy --num-workers $(TYPE_PROCESSES)
	@echo "==> layers"
	@$(BIN)/lint-imports

# Many tests wait for a server or a deadline, so that three processes keep two cores busy. Neighbours
# stay together, so that what a module shares is seldom started twice; whoever is done takes from
# the others.
test: check
	@echo "==> tests"
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

test-browser: $(INSTALLED)
	@$(BIN)/python tests/browser/chromium.py >/dev/null
	@echo "==> tests in a browser"
	@$(BIN)/python -m pytest -n $(BROWSER_PROCESSES) --dist loadfile tests/browser

# What it finds becomes a test with this one example, beside the property.
explore: $(INSTALLED)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m hypothesis --hypothesis-profile=explore

screenshots: $(INSTALLED)
	@PYTHONPATH=tests $(BIN)/python -m browser.screenshots

sync-client: $(INSTALLED)
	@$(BIN)/python scripts/generate_sync_client.py

# What is only measured beside must not change what the tests see, so it lies apart; and where it
# does not install, the run goes without.
$(PEERS_INSTALLED): pyproject.toml constraints.txt
	@echo "==> installing other task queues into $(PEERS_VENV), to measure them in the same run"
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@if PIP_DISABLE_PIP_VERSION_CHECK=1 $(PEERS_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[bench]'; \
		then touch $@; else echo "==> not all of them install here; what is missing is left out"; fi

bench: $(INSTALLED) $(PEERS_INSTALLED)
	@$(BIN)/python -m benchmarks

torture: $(INSTALLED)
	@$(BIN)/python -m torture

# The wheel is installed with the service and the source archive bare, each as a stranger would.
package: $(INSTALLED)
	@rm -rf dist build
	@echo "==> building into dist"
	@$(BIN)/python -m hatchling build -d dist
	@echo "==> installing the wheel with the service, and the source archive bare"
	@$(PYTHON) -m venv build/served && $(PYTHON) -m venv build/bare
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/served/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/headgate-*.whl)[server]"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/bare/bin/python -m pip install --quiet -c constraints.txt dist/headgate-*.tar.gz
	@echo "==> a task, run by the one and submitted from the other"
	@build/served/bin/headgate up --port 7499 --data build/data >build/up.log 2>&1 & service=$$!; \
		timeout 60 build/bare/bin/headgate submit hello --agent packaged --wait --patient --url http://127.0.0.1:7499; code=$$?; \
		kill $$service; wait $$service; [ $$code = 0 ] || cat build/up.log; exit $$code

clean:
	rm -rf $(VENV) $(PEERS_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks torture -name __pycache__ -prune -exec rm -rf {} +

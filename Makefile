# Everything here needs python3, pip and make, and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
DOCS_TOOLS := $(VENV)/.installed-docs
PEERS_VENV := .venv-bench
PEERS_INSTALLED := $(PEERS_VENV)/.installed
CLIENTS := .clients
GATEWAYS_VENV := .venv-gateways
GATEWAYS_INSTALLED := $(GATEWAYS_VENV)/.installed
PORTKEY := @portkey-ai/gateway@1.15.2
TYPE_PROCESSES ?= 2
TEST_PROCESSES ?= 3
BROWSER_PROCESSES ?= 2

# Images of containers often forbid Python to keep what it compiled. The tests start hundreds of
# processes, and each would compile everything anew, which takes longer than most of them run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run up demo test test-walk test-browser test-clients test-ray explore screenshots sync-client check docs bench torture package clean

help:
	@echo "make run      install into $(VENV) and run an example workflow, inside a budget"
	@echo "make up       install into $(VENV) and start the service on 127.0.0.1:7420, or PORT=8080"
	@echo "make demo     the same with simulated agents and a fake provider; nothing is kept"
	@echo "make test     install, then format check, lint, types, layers and tests"
	@echo "make test-walk     install the wheel as a user does, and follow the README and the pages"
	@echo "make test-browser  drive every page of the dashboard in the system's Chromium"
	@echo "make test-clients  run Claude Code, Codex, opencode, SDKs and LangChain through the gateway"
	@echo "make test-ray      run tasks on a real Ray cluster of two nodes, and kill parts of it"
	@echo "make explore  run the tests of properties with examples that no run has tried yet"
	@echo "make screenshots   draw every page into build/screenshots, and those of the docs anew"
	@echo "make sync-client   write the synchronous client anew from the asynchronous one"
	@echo "make docs     build the documentation site into build/site"
	@echo "make bench    measure; prints ratios against a floor in the same run"
	@echo "make torture  kill processes at random for minutes; nothing may be lost"
	@echo "make package  build the wheel and the source archive, install both, run a task"
	@echo "make clean    remove $(VENV) and caches"

# The product alone, which is all that a user needs; once, and again when what it needs changes.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "==> installing Headgate into $(VENV): about 100 MB, about 15 seconds"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "headgate needs Python 3.11 or newer; set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e .
	@touch $@

# What the checks and tests need beside it.
$(TOOLS): $(INSTALLED)
	@echo "==> installing what the tests need into $(VENV): about 500 MB, about a minute"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)
	@$(BIN)/headgate run examples/evaluation/evaluation.yaml
	@echo "==> its report: headgate runs output last report"
	@$(BIN)/headgate runs output last report

up: $(INSTALLED)
	@$(BIN)/headgate up $(if $(PORT),--port $(PORT))

demo: $(INSTALLED)
	@$(BIN)/headgate up --demo $(if $(PORT),--port $(PORT))

check: $(TOOLS)
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

# The wheel in an empty environment, and the commands of the README and the pages, in order.
test-walk: $(TOOLS)
	@echo "==> walking the README and the pages with the installed wheel"
	@$(BIN)/python -m pytest tests/walk

test-browser: $(TOOLS)
	@$(BIN)/python tests/browser/chromium.py >/dev/null
	@echo "==> tests in a browser"
	@$(BIN)/python -m pytest -n $(BROWSER_PROCESSES) --dist loadfile tests/browser

# Unmodified clients from npm and from Python's index, pinned, apart from everything else. One queue is
# waited in while the others run, so that they share a process.
test-clients: $(TOOLS)
	@if ! command -v npm >/dev/null; then \
		echo "==> skipped the tests with real clients: they come from npm, and no npm is here"; \
	else \
		echo "==> installing clients into $(CLIENTS) (only when their versions changed)" && \
		$(BIN)/python tests/clients/install.py && \
		echo "==> tests with real clients" && \
		$(BIN)/python -m pytest tests/clients; \
	fi

# A real cluster of two nodes on the loopback address; Ray is large, and nothing else needs it.
test-ray: $(TOOLS)
	@$(BIN)/python -c 'import ray' 2>/dev/null || { echo "==> installing Ray into $(VENV): about 250 MB" && \
		PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e '.[ray]'; }
	@echo "==> tests on a Ray cluster"
	@$(BIN)/python -m pytest tests/on_ray

# What it finds becomes a test with this one example, beside the property.
explore: $(TOOLS)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m hypothesis --hypothesis-profile=explore

screenshots: $(TOOLS)
	@PYTHONPATH=tests $(BIN)/python -m browser.screenshots

$(DOCS_TOOLS): $(INSTALLED)
	@echo "==> installing what the site needs into $(VENV): about 50 MB"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e '.[docs]'
	@touch $@

# Another version goes beside those that are in build/site already.
docs: $(DOCS_TOOLS)
	@$(BIN)/python scripts/build_docs.py

sync-client: $(TOOLS)
	@$(BIN)/python scripts/generate_sync_client.py

# What is only measured beside must not change what the tests see, so it lies apart; and where it
# does not install, the run goes without.
$(PEERS_INSTALLED): pyproject.toml constraints.txt
	@echo "==> installing other task queues into $(PEERS_VENV), to measure them in the same run"
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@if PIP_DISABLE_PIP_VERSION_CHECK=1 $(PEERS_VENV)/bin/python -m pip install -qq -c constraints.txt -e '.[bench]'; \
		then touch $@; else echo "==> not all of them install here; what is missing is left out"; fi

# What they need contradicts what Headgate needs, so they are installed without it. One of them comes
# from npm, and is left out where that is missing.
LIST_GATEWAYS := $(GATEWAYS_VENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['gateways'])"
$(GATEWAYS_INSTALLED): pyproject.toml
	@echo "==> installing other gateways into $(GATEWAYS_VENV), to measure them in the same run"
	@test -x $(GATEWAYS_VENV)/bin/python || $(PYTHON) -m venv $(GATEWAYS_VENV)
	@if PIP_DISABLE_PIP_VERSION_CHECK=1 $(GATEWAYS_VENV)/bin/python -m pip install -qq $$($(LIST_GATEWAYS)); \
		then touch $@; else echo "==> not all of them install here; what is missing is left out"; fi
	@npm install --silent --ignore-scripts --no-audit --no-fund --prefix $(GATEWAYS_VENV) $(PORTKEY) \
		|| echo "==> Portkey does not install here; it is left out"

bench: $(TOOLS) $(PEERS_INSTALLED) $(GATEWAYS_INSTALLED)
	@$(BIN)/python -m benchmarks

torture: $(TOOLS)
	@$(BIN)/python -m torture

# The wheel and the source archive are each installed as a stranger would.
package: $(TOOLS)
	@rm -rf dist build
	@echo "==> building into dist"
	@$(BIN)/python -m hatchling build -d dist
	@echo "==> installing the wheel and the source archive"
	@$(PYTHON) -m venv build/wheel && $(PYTHON) -m venv build/source
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/wheel/bin/python -m pip install -qq -c constraints.txt dist/headgate-*.whl
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/source/bin/python -m pip install -qq -c constraints.txt dist/headgate-*.tar.gz
	@echo "==> a task, run by the one and submitted from the other"
	@build/wheel/bin/headgate up --port 7499 --data build/data >build/up.log 2>&1 & service=$$!; \
		timeout 60 build/source/bin/headgate submit hello --agent packaged --wait --patient --url http://127.0.0.1:7499; code=$$?; \
		kill $$service; wait $$service; [ $$code = 0 ] || cat build/up.log; exit $$code

clean:
	rm -rf $(VENV) $(PEERS_VENV) $(CLIENTS) $(GATEWAYS_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks torture -name __pycache__ -prune -exec rm -rf {} +

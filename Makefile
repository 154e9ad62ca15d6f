# Everything here needs python3, pip and make, and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help up test check bench torture clean

help:
	@echo "make up       install into $(VENV) and run the demonstration fleet"
	@echo "make test     install, then format check, lint, types, layers and tests"
	@echo "make bench    measure; prints ratios against a floor in the same run"
	@echo "make torture  kill processes at random for minutes; nothing may be lost"
	@echo "make clean    remove $(VENV) and caches"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "==> installing into $(VENV) (only when pyproject.toml or constraints.txt changed)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "headgate needs Python 3.11 or newer; set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

up: $(INSTALLED)
	@$(BIN)/headgate demo

check: $(INSTALLED)
	@echo "==> format"
	@$(BIN)/ruff format --check .
	@echo "==> lint"
	@$(BIN)/ruff check .
	@echo "==> types"
	@$(BIN)/mypy
	@echo "==> layers"
	@$(BIN)/lint-imports

test: check
	@echo "==> tests"
	@$(BIN)/python -m pytest

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks

torture: $(INSTALLED)
	@$(BIN)/python -m torture

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks torture -name __pycache__ -prune -exec rm -rf {} +

# Everything runs in .venv, made here with pip. Needs Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint protos bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED) ## Make .venv with everything in it

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --upgrade --quiet pip
	$(BIN)/pip install --progress-bar on -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Start a small cluster, ask the real model a question, show where the time went
	$(BIN)/tandem demo

test: lint ## Lint, types, and all tests that take seconds
	$(PYTEST) -m "not slow and not chaos and not gpu"

test-all: lint ## The same, with the tests that take minutes or kill processes
	$(PYTEST) -m "not gpu"

lint: $(INSTALLED) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: $(INSTALLED) ## Generate the wire code anew
	$(BIN)/python protos/generate.py

bench: $(INSTALLED) ## Measure engine, transfer and hand-off beside what they are compared with
	$(BIN)/python loadtest/bench.py

clean: ## Remove what was made here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

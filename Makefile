# Needs python3 (3.11 or newer), pip and git; everything else goes into .venv.
#   PYTHON  the interpreter that makes .venv
#   TORCH   what pip installs first, options allowed, so that nothing else chooses the build of torch
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
READY  := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all check lint types bench study studies clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("farflung needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

venv: $(READY)  ## build .venv; again whenever pyproject.toml changes

demo: $(READY)  ## train four learners, kill one, prove that it came back right: runs/demo
	@if [ -e runs/demo ]; then rm -rf runs/demo.previous && mv runs/demo runs/demo.previous; fi
	$(BIN)/farflung run recipes/demo.toml --out runs/demo

lint: $(READY)  ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy, strict for core, protocol and methods
	$(BIN)/mypy

test: lint types  ## all of the above, then every test and docstring example that is not slow
	$(BIN)/pytest --doctest-modules src tests

check: test  ## the same as test

test-all: lint types  ## test, and the slow tests too: real processes, minutes
	$(BIN)/pytest --doctest-modules src tests -m ''

bench: $(READY)  ## speed against what this machine can do
	$(BIN)/farflung bench

study: $(READY)  ## the missing cells of one study, NAME=heterogeneous for instance: docs/results
	@test -n "$(NAME)" || { echo 'give a name: make study NAME=heterogeneous' >&2; exit 2; }
	$(BIN)/python -m studies.run $(NAME)

studies: $(READY)  ## the missing cells of all studies: up to an hour and a half on two cores
	$(BIN)/python -m studies.run

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

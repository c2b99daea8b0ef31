# make demo   a reasoning model is made in front of you, in minutes, without a GPU
# make test   everything is set up and the tests pass
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help demo test test-slow lint setup sandbox clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(VENV)/.installed
	$(BIN)/klear run configs/laptop

test: $(VENV)/.installed-dev sandbox
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev sandbox
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.installed-dev sandbox

sandbox:
	@sh infra/install_sandbox.sh

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Klear needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs

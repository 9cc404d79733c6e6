# Everything a newcomer needs: each target sets up its own .venv first.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The versions that are tested; `make CONSTRAINTS= …` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
# Test processes; each forks ranks of its own.
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
# Tests start many processes, each of which would compile what is not kept compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train test test-full lint types clean

help:
	@echo "make train      train a small Llama on eight ranks (dp 2 x tp 2 x pp 2) of this machine"
	@echo "make test       the tests; make test-full also runs every cell of every matrix"
	@echo "make lint types what CI checks besides"

install: $(VENV)/.installed

# pip alone first: an old one resolves constraints differently. torch by itself, so that its pinned build is taken.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet setuptools wheel
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) torch
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) -e ".[dev]"
	touch $@

train: install
	$(BIN)/megastack train experiment=laptop

test: install
	$(BIN)/python -m pytest -n $(WORKERS)

test-full: install
	$(BIN)/python -m pytest -n $(WORKERS) -m "full or not full"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

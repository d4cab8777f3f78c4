# Everything a checkout needs, given Python 3.11 or later, make and git.
#   make demo     8 peers in 2 hidden clusters find each other, live, on this machine
#   make test     the default tests        make check   ruff and mypy
#   make slow     the long tests           make docker  the image and the tests in containers
#   make clean    forget what was built
#
# On Linux, PyPI's torch is the CUDA build, gigabytes of it. A CPU build comes from elsewhere:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

TORCH_INDEX ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --constraint constraints.txt
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
# One thread a process: the tests start many processes, and threads that compete slow all of them.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check slow docker clean
.DEFAULT_GOAL := demo

demo: $(RUNTIME)
	@$(BIN)/simulate demo --out runs/demo

test: $(DEV)
	$(BIN)/python -m pytest

slow: $(DEV)
	$(BIN)/python -m pytest -m slow --timeout 1800

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docker: $(DEV)
	$(BIN)/python -m pytest -m docker --timeout 1800

clean:
	rm -rf $(VENV) build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "panmesh needs Python 3.11 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "make: creating $(VENV)"
	@"$(PYTHON)" -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installing torch into $(VENV) (once; a few minutes)"
	@$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "make: installing panmesh into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "make: installing what the tests and checks need into $(VENV)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@

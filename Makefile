# make demo    set up .venv, then serve a small model twice (plain and with DDTree) and compare the answers
# make test    set up .venv, then run the tests
# make lint    set up .venv, then ruff and mypy
# make setup   only set up .venv
#
# A machine without a GPU gets the small set of packages (requirements/cpu.lock), one with a GPU the full one
# (gpu.lock).
# Needs Python 3.11 or newer with pip and venv. Settings, all optional:
#   PYTHON=python3.12          the Python that .venv is made from
#   DEVICE=cpu | gpu           which set to install, instead of asking nvidia-smi
#   PIP_ARGS="..."             passed to every `pip install`, for example an extra index (README, "Without a GPU")
#   PYTEST_ARGS="-k tree"      passed to pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
PYTEST_ARGS ?=
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
DEVICE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
LOCKS := requirements/$(DEVICE).lock requirements/dev.lock $(if $(filter gpu,$(DEVICE)),requirements/gpu-source.lock)

# The set-up is repeated when a lock, pyproject.toml or the device changes: its stamp carries their checksum.
STAMP := $(VENV)/.setup-$(DEVICE)-$(shell cat $(LOCKS) pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

.PHONY: help demo test lint setup clean

help:
	@sed -n '1,4p' Makefile | sed 's/^# //'

demo: setup
	@$(BIN)/python -m sglang_dflash.demo

test: setup
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	@echo "== ruff check";  $(BIN)/ruff check .
	@echo "== ruff format"; $(BIN)/ruff format --check .
	@echo "== mypy";        $(BIN)/mypy

setup: $(STAMP)

$(STAMP):
	@case "$(DEVICE)" in cpu|gpu) ;; *) echo "make: DEVICE is '$(DEVICE)', wanted cpu or gpu" >&2; exit 1;; esac
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "make: PYTHON is '$(PYTHON)', wanted Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "== set-up for $(DEVICE): $(VENV) from $$($(PYTHON) --version); the first time takes minutes"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "make: $(PYTHON) cannot make a virtual environment; install its venv module (python3-venv)" >&2; exit 1; }
	@echo "== packages: $(LOCKS)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps $(PIP_ARGS) \
		-r requirements/$(DEVICE).lock -r requirements/dev.lock \
		| grep -v 'already satisfied' | cut -c1-160 || [ $${PIPESTATUS[0]} -eq 0 ]
	@$(BIN)/python -c 'import torch; print("== torch", torch.__version__)' || { \
		echo "make: torch does not import. Without a GPU it must be the CPU build: run" \
		"make PIP_ARGS=\"--extra-index-url <PyTorch's CPU index>\" after rm -rf $(VENV)" >&2; exit 1; }
ifeq ($(DEVICE),gpu)
	@if command -v nvcc >/dev/null; then echo "== causal-conv1d: compiling"; \
		$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps --no-build-isolation \
			$(PIP_ARGS) -r requirements/gpu-source.lock; \
	else echo "== causal-conv1d: left out, no nvcc on PATH (the server does not need it)"; fi
endif
	@echo "== sglang-dflash itself (editable)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.setup-*
	@touch $(STAMP)
	@echo "== set-up done"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

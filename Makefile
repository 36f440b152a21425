# Both commands of a newcomer: `make train` and `make test`. Each first makes `.venv` and installs into it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help install train test lint types docs check thorough zoo libraries fuzz gpu snippets dist clean

# The first interpreter that answers and is a supported version: a name can exist and still not run
# (version managers leave such stubs), so each is asked rather than looked up.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	"$$name" -c '$(SUPPORTED)' 2>/dev/null && echo "$$name" && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
# Processes that `make check` runs tests in.
WORKERS ?= 2
# That `make fuzz` draws programs from.
SEEDS ?= 0-99
# That `make gpu` tries.
DEVICE ?= cuda

help:  ## Say what each target does
	@grep -E '^[a-z]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*  ## (.*)/  make \1\t\2/'

install: $(STAMP)  ## Make .venv and install the project into it, editable, with everything the tests need

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make install PYTHON=/path/to/python3.11" >&2; \
		exit 1; fi
	@"$(PYTHON)" -c '$(SUPPORTED)' || { \
		echo "PYTHON=$(PYTHON) does not run as Python 3.11, 3.12 or 3.13. Name one that does: make install PYTHON=python3.11" >&2; \
		exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# The stamp makes a second `make install` cost nothing until a dependency changes.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,recipes,huggingface]'
	# They require torchvision, whose builds on PyPI do not load beside a CPU torch, or older versions of other
	# packages than the rest does; what the tests use of them runs without.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm \
		litdata mosaicml-streaming boto3 botocore jmespath s3transfer brotli catalogue cramjam python-snappy zstd
	@touch $@

train: install  ## Train the gpt recipe on two processes with DDP
	$(BIN)/trainwright fit recipe=gpt strategy=ddp devices=2

# The type checker and the site use the cores that tests leave idle.
test: install lint  ## Run the linters, the type checker, the documentation and the tests
	$(MAKE) --no-print-directory --jobs=2 check types docs

lint: install  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## Check the types of the package
	$(BIN)/mypy -p trainwright

# Strict: a page outside of the navigation, a link or an anchor that leads nowhere is an error, as is whatever a page
# would load from elsewhere.
docs: install  ## Build the documentation site into build/site, offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@! grep -rEo --include='*.html' '<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//[^ >]*' build/site

# Tests that measure times (`alone`, in tests/conftest.py) run afterwards, one by one. Both parts run, whatever fails.
# Hundreds of processes import the same modules: each is compiled once, even where the shell forbids it.
check thorough: export PYTHONDONTWRITEBYTECODE =
check thorough: export OMP_NUM_THREADS = 1
check: LEFT_OUT = and not thorough
check: install  ## Run the test suite, with samples of its large tables of cases
thorough: install  ## Run every case of every test
check thorough:
	status=0; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not alone $(LEFT_OUT)' || status=1; \
	$(BIN)/python -m pytest -m 'alone $(LEFT_OUT)' || status=1; \
	exit $$status

zoo: install  ## Train every module of tests/zoo under all its layouts, of which make test takes a sample
	ZOO=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/zoo

libraries: install  ## Install libraries built on Lightning, train their modules under all layouts, write docs/libraries.md
	$(BIN)/python -m tests.libraries.install
	$(BIN)/python -m tests.libraries.record
	$(BIN)/python -m tests.libraries

fuzz: install  ## Train programs drawn by seed on one process and under layouts, and compare them (SEEDS=0-99)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(SEEDS) --shrink

gpu: install  ## Try every layout on the GPUs of this machine and write docs/gpu.md (half an hour; DEVICE=cpu: without one)
	@test "$(DEVICE)" = cpu || $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
		$(BIN)/python -m pip install --constraint constraints.txt --force-reinstall torch
	$(BIN)/python -m benchmarks.gpu --device=$(DEVICE)

snippets: install  ## Really run the commands of the documentation, small (minutes; not part of make test)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs.snippets

# The wheel is tried where neither the sources nor the development environment can be found.
dist: install  ## Build and check the wheel and the source distribution, and train from the wheel in a new environment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	rm -rf dist build/tried
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv build/tried
	build/tried/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(ls $(CURDIR)/dist/*.whl)[recipes]"
	cd build/tried && env -u PYTHONPATH bin/trainwright fit recipe=digits strategy=ddp devices=2 max_steps=20 run_dir=run

clean:  ## Remove what building and testing leave (not .venv, not runs)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# make setup | demo | test | lint | bench | docs | clean. Each sets up .venv first, once; nothing is installed twice.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS   ?= 3

# One thread a process: results are then the same bits everywhere, and tests that run side by side do not fight for cores.
test demo bench: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs clean

help:
	@echo "make setup   .venv alone, which the others make when it is missing"
	@echo "make demo    train one model with four unlike workers, for real and simulated, and report"
	@echo "make test    style, types and tests"
	@echo "make lint    style and types only"
	@echo "make bench   reproduction and speed tables"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make clean   remove caches and build leftovers (keeps .venv and runs/)"

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Gossamer needs Python 3.11 or newer, and $(PYTHON) was not found. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Gossamer needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV): once, one to six minutes by how quick the downloads are, 2.6 GB"
	@echo "1 of 4: a virtual environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "2 of 4: $$(grep '^torch==' constraints.txt)"
	@$(PIP) install --no-compile "$$(grep '^torch==' constraints.txt)"
	@echo "3 of 4: gossamer, and what it, its extras and its tests need: the longest"
	@$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@echo "4 of 4: the packages are compiled"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # with all cores, where pip uses one; some packages hold files of Python 2
	@touch $@
	@echo "$(VENV) is ready"

setup: $(READY)
	@echo "next: source $(VENV)/bin/activate"

demo: $(READY)
	@$(BIN)/python -m gossamer demo

test: lint
	@echo "tests"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --no-loadscope-reorder

lint: $(READY)
	@echo "style"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "some files are not formatted; run: $(BIN)/ruff format"; exit 1; }
	@echo "types"
	@$(BIN)/mypy --no-error-summary

bench: $(READY)
	@$(BIN)/python -m bench

$(DOCS): $(READY)
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

clean:
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .cache *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

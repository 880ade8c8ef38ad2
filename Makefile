# demo  tune DeepSeek-V3, show the tactics, diff EP 1 against EP 8: on this machine's GPU, or on the shipped H200
#       recording where there is none with room for the layer (then no torch is installed)
# test  lint, types, layers and all tests
# lint  ruff, mypy and the import layers alone
# docs  the results page, the table of the kernels' page and all pictures, made anew
# venv  the whole development environment in .venv
#
# Each target installs what it needs into .venv first. PYTHON=/path/to/python3.11 chooses the interpreter.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
DEMO_STORE ?= demo-store
# EP 1 holds 22.5 GB of weights. A GPU of 45,000 MiB has room for them and the rest; a smaller one is left alone.
GPU_MIB := $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
BIG_GPU := $(shell test "$(GPU_MIB)" -ge 45000 2>/dev/null && echo yes)
MEASURER ?= $(if $(BIG_GPU),auto,$(if $(GPU_MIB),recording,auto))
DEMO_OPTIONS := --measurer $(MEASURER) $(if $(BIG_GPU),--budget 330s)
DEMO_EXTRAS := $(if $(BIG_GPU),all,search)
DEMO_DONE := $(VENV)/demo-$(DEMO_EXTRAS).done
PYTEST_ARGS ?= -n 2 -q
PYTHON ?= $(shell for each in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$each && break; done)

.PHONY: demo test lint docs venv tree clean
.DELETE_ON_ERROR:

demo: $(DEMO_DONE)
	$(BIN)/fitune search --model deepseek-v3 --dtype bf16 --ep 1,8,16 $(DEMO_OPTIONS) --store $(DEMO_STORE)
	$(BIN)/fitune show --store $(DEMO_STORE)
	$(BIN)/fitune diff --store $(DEMO_STORE) --ep 1,8

test: lint
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: venv tree
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=build/lint $(BIN)/lint-imports

docs: venv
	$(BIN)/python scripts/make_results.py
	$(BIN)/python scripts/make_diff_picture.py

venv: $(VENV)/dev.done

# mypy and import-linter read packages from disk, so they get one folder that looks like the installed package.
tree:
	@rm -rf build/lint && mkdir -p build/lint/fitune
	@ln -s $(CURDIR)/autotune/* build/lint/fitune/
	@ln -s $(CURDIR)/kernels $(CURDIR)/cache build/lint/fitune/

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "fitune needs Python 3.11 or newer, but here python3 is" \
	"$$(python3 --version 2>&1 || echo missing). Install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2; \
	exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { echo "PYTHON=$(PYTHON) is no" \
	"Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_DONE): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[all,dev]'
	@touch $@ $(VENV)/demo-search.done $(VENV)/demo-all.done

clean:
	rm -rf $(VENV) build dist fitune.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

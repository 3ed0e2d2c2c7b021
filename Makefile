# make demo, make test: nothing else to install. PYTHON picks the interpreter (3.10 to 3.13).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# -qq: errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
STAMP := $(VENV)/.stamp
SOURCES := pyproject.toml constraints.txt

# SGLang pins what the rest does not want, so it has an environment of its own, by its list, outside
# of any checkout. What is tested is installed into build/sglang of this one.
SGLANG_LIST := tests/sglang/requirements.txt
SGLANG_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/replayinfer/sglang-$(firstword \
    $(shell cksum $(SGLANG_LIST)))
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip -qq --disable-pip-version-check --no-input

.PHONY: help demo test test-gpu test-sglang sglang-env lint typecheck format docs wheel packages clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      serve two small hybrid models by replay, and check every token"
	@echo "make test      the whole suite on the CPU, Triton through its interpreter"
	@echo "make test-gpu  tests marked gpu, with the Python that has torch (no network needed)"
	@echo "make test-sglang   SGLang's own engine on the CPU, in an environment that is made for it"
	@echo "make lint      ruff and mypy          make format    apply ruff's fixes and format"
	@echo "make docs      build the site         make wheel     build dist/*.whl"
	@echo "make packages  rewrite the package list of pyproject.toml from the folders"
	@echo "make clean     remove what was built, .venv apart"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "PYTHON: got $$($(PYTHON) -V 2>&1); allowed 3.10 or newer; make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; a set is installed again when its pins or metadata change.
$(STAMP)-%: $(SOURCES) | $(BIN)/python
	@echo "installing replayinfer[$*] into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(STAMP)-demo
	$(BIN)/replayinfer demo $(ARGS)

# TRITON_INTERPRET only works if it is set before the first import of Triton by anyone.
test: $(STAMP)-test,demo
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n 2 $(ARGS)

test-gpu:
	PIP_BREAK_SYSTEM_PACKAGES=1 $(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	env -u TRITON_INTERPRET $(PYTHON) -m pytest -q -m gpu $(ARGS)

sglang-env: $(SGLANG_VENV)/.stamp

# Its name has the list's checksum, so a newer file of the same content makes it no older.
$(SGLANG_VENV)/.stamp: | $(SGLANG_LIST)
	@echo "installing SGLang for tests into $(SGLANG_VENV)"
	@rm -rf $(SGLANG_VENV)
	@mkdir -p $(dir $(SGLANG_VENV))
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_PIP) install torch==2.13.0
	@$(SGLANG_PIP) install --no-deps -r $(SGLANG_LIST)
	@touch $@

test-sglang: sglang-env
	@rm -rf build/sglang build/lib
	@$(SGLANG_PIP) install --no-deps --no-build-isolation --target build/sglang .
	@rm -rf build/lib
	PYTHONPATH=$(CURDIR)/build/sglang TRITON_INTERPRET=1 $(SGLANG_VENV)/bin/pytest -q \
	    tests/sglang $(ARGS)

lint: $(STAMP)-lint,demo
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory typecheck

# build/lib goes wherever a wheel is built: setuptools would ship deleted modules from it.
typecheck: $(STAMP)-lint,demo
	@rm -rf build
	@$(PIP) install --no-deps --no-build-isolation --target build/typecheck .
	@rm -rf build/lib
	MYPYPATH=build/typecheck $(BIN)/mypy -p replayinfer

format: $(STAMP)-lint,demo
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)-docs
	@if [ -f mkdocs.yml ]; then $(BIN)/mkdocs build --strict --quiet; \
	else echo "docs: no mkdocs.yml, nothing to build"; fi

wheel: $(STAMP)-lint,demo
	@rm -rf build/lib
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build/lib
	@ls dist/*.whl

packages: $(STAMP)-test,demo
	$(BIN)/python tests/test_packaging.py

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

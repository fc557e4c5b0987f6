PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PLUGINS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml)))
SOURCES := $(addsuffix /src,$(PLUGINS))
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(INSTALLED)  ## a real model answers a question
	$(BIN)/atom generate demo --dtype float32 --chat "What is the capital of France, and what is it known for?" \
		--max-tokens 64 --max-model-len 2048 --cache-memory 1GiB --show-plan

test: $(INSTALLED)  ## all tests of the core and the plugins
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests $(PLUGINS)

lint: $(INSTALLED)  ## format, style, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy atom_core
	$(foreach plugin,$(PLUGINS),$(BIN)/mypy $(plugin)/src &&) true
	$(BIN)/lint-imports

bench: $(INSTALLED)  ## against transformers' generate, in one run
	$(BIN)/python benchmarks/compare_transformers.py

$(INSTALLED): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' $(addprefix -e ./,$(PLUGINS))
	touch $@

clean:
	rm -rf $(VENV)

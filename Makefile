# Needs Python >= 3.11 and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/demo

.PHONY: demo test test-fast gpu-check lint install clean

demo: .venv/installed   ## train a small LoL on the standard library's text, sample from it, draw its paths
	$(BIN)/lol train --recipe demo --run $(RUN)
	$(BIN)/lol generate --model $(RUN) --prompt "def read(self, size=-1):" --max-new-tokens 120 --seed 0
	$(BIN)/lol paths report --run $(RUN)

test: .venv/installed lint   ## everything that has to hold before a change lands
	$(BIN)/pytest -n 2 --dist worksteal

test-fast: .venv/installed   ## the quick part of it
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

gpu-check: .venv/installed   ## a GPU against the CPU, a step of each published run, the benches; one line without a GPU
	$(BIN)/lol bench gpu

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed, this is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python tests/ecosystem/fetch_transformers_tests.py
	touch $@

clean:
	rm -rf .venv

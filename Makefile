# Everything a newcomer needs: `make demo` and `make test` set up what they lack and then do their job.
PYTHON ?= python3
DATA ?=
PROCESSES ?= 2
SECONDS ?= 300
BIN := .venv/bin
READY := .venv/.ready
BROWSER := .venv/.browser
# Warnings of pip's own code, or of running as root, would only alarm: it changes .venv alone.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action ignore
export PYTHONWARNINGS ?= default
# Tests start hundreds of short processes: without its bytecode, each would compile dubito again.
unexport PYTHONDONTWRITEBYTECODE
# Some virtual machines announce AMX and kill a process that uses it, as torch does in bfloat16.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Material for MkDocs announces its successor at every build; this is its own switch for that.
export NO_MKDOCS_2_WARNING ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test browser check examples format docs bench faults fuzz clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) $(BROWSER)  ## make .venv and install dubito into it, editable, with everything its developers use

# uv installs by hard links from its cache, so a second checkout costs seconds; where it cannot reach the registry, pip does.
# Bytecode is compiled now: where Python may not write it, every command would compile PyTorch again.
$(READY): pyproject.toml
	@echo "Installing dubito and what its developers use into .venv; the first time this takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) uv
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e ".[dev]" || $(PIP) -e ".[dev]"
	@touch $@

# A Chromium for the tests that drive pages, one on the PATH or one in .venv/browser, and axe-core. Without them, tests are skipped.
browser: $(READY)  ## find or install the browser that tests/browser drives, and axe-core
	@$(BIN)/python tests/browser/install.py

# Tried once; `make browser` tries again.
$(BROWSER): $(READY) tests/browser/install.py
	@$(BIN)/python tests/browser/install.py > $@ || true

demo: $(READY)  ## score real photographs and their corrupted copies, and write a page about them
	@$(BIN)/dubito demo --to demo

# Two processes of one thread each: half the time of one process with two threads. loadscope: a module's set-up runs once.
test: $(READY) $(BROWSER)  ## run all tests and doctests; PROCESSES=N for more than two at once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PROCESSES) --dist loadscope --no-loadscope-reorder

check: $(READY)  ## format, lint, types, rules of the house, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_rules.py
	$(BIN)/mkdocs build --strict --quiet

examples: $(READY)  ## run every example of README and documentation, and compare what it prints
	$(BIN)/python docs/_blocks.py --jobs $(PROCESSES)

format: $(READY)  ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## serve the documentation while writing it
	$(BIN)/mkdocs serve

bench: $(READY)  ## speed as ratios; DATA=folder for those that need photographs
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/neighbours.py
	$(BIN)/python benchmarks/density.py
	$(BIN)/python benchmarks/filter.py
	$(BIN)/python benchmarks/tiles.py
	$(BIN)/python benchmarks/masks.py
	$(BIN)/python benchmarks/extract.py $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/ray_engine.py --kills
	$(BIN)/python benchmarks/locations.py $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/head_training.py
	$(BIN)/python benchmarks/large.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/explore.py
	$(if $(DATA),$(BIN)/python benchmarks/gradient.py --data $(DATA))
	$(if $(DATA),$(BIN)/python benchmarks/cache_speedup.py --data $(DATA))
	$(if $(DATA),$(BIN)/python benchmarks/serve.py --data $(DATA))

# One thread per process: several of them run at the same time.
faults: $(READY)  ## kill, stop, fill, damage and disconnect everything at 300 random instants, and count what is lost
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.run

fuzz: $(READY)  ## damage and forge everything that is read, for SECONDS=300; inputs that show a fault are kept for the tests
	nice -n 10 $(BIN)/python tests/fuzz/run.py --seconds $(SECONDS)

clean:  ## remove what was built, and the environment
	rm -rf .venv site demo dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

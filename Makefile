# Two commands do everything, set-up included:
#   make demo    every step on two models
#   make test    checks and tests
# Others: test-slow, test-versions, lint, docs, bench, clean. The environment is .venv; delete it to start over.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A test process uses one thread; pytest runs two of them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-slow test-versions lint docs bench coverage install clean

demo: $(STAMP)
	$(BIN)/layergraph demo $(ARGS)

test: lint
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu" $(ARGS)

# Another pair of versions; by default the lower end of transformers with the torch of every day. Any other torch comes
# with several GB of CUDA:  make test-versions TORCH=2.11.0  |  make test-versions TORCH=2.14.1 TRANSFORMERS=5.24.0
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.17.0
OTHER := .venv-$(TORCH)-$(TRANSFORMERS)
test-versions: $(STAMP)
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	sed 's/^transformers==.*/transformers==$(TRANSFORMERS)/; s/^torch==.*/torch==$(TORCH)/; /^triton==/d' \
		constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --disable-pip-version-check -q -e '.[dev]' -c $(OTHER)/constraints.txt
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" \
		tests/ir tests/trace tests/testing tests/runtime tests/passes $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Runs what the documents show and writes the outputs into them.
docs: $(STAMP)
	$(BIN)/python docs/refresh.py $(ARGS)

bench: $(STAMP)
	$(BIN)/layergraph bench kernels $(ARGS)

# Every architecture of transformers, tiny, against eager: hours; goes on where it stopped; --again fail checks anew.
# In an environment of its own: with timm and torchvision there, transformers takes other ways in tests as well.
COVERAGE := .venv-coverage
coverage: $(STAMP)
	test -x $(COVERAGE)/bin/python || $(PYTHON) -m venv $(COVERAGE)
	$(COVERAGE)/bin/python -m pip install --disable-pip-version-check -q -e '.[dev,coverage]' -c constraints.txt
	OMP_NUM_THREADS=1 $(COVERAGE)/bin/python -m layergraph.testing.coverage_run $(ARGS)

install: $(STAMP)

# Again whenever the requirements change, and only then.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "layergraph needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev]' -c constraints.txt
	@touch $@

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info

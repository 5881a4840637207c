# Everything is set up in .venv on first use; only Python 3.11, pip and make are needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format docs clean

demo: .venv/installed
	$(BIN)/flatfed demo

# A file of tests per core at a time.
test: lint
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/installed
	$(BIN)/python docs/generate.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[development]'
	touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

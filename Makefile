# Everything is set up in .venv on first use; only Python 3.11, pip and make are needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format docs fuzz benchmark-check clean

demo: .venv/installed
	$(BIN)/flatfed demo

# Files of tests beside each other, and the linters beside them; what these say comes last.
test: .venv/installed
	@lint=$$(mktemp); $(MAKE) --no-print-directory lint > $$lint 2>&1 & linting=$$!; \
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder; tested=$$?; \
	wait $$linting; linted=$$?; cat $$lint; rm $$lint; [ $$tested$$linted = 00 ]

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

# Twenty minutes a target: `make fuzz`, or `make fuzz TARGETS=payloads MINUTES=60`.
MINUTES ?= 20
fuzz: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python tests/fuzz/nightly.py $(TARGETS) --minutes $(MINUTES)

# Is this version slower than COMMIT? Needs an idle machine.
COMMIT ?= HEAD~1
benchmark-check: .venv/installed
	$(BIN)/python benchmarks/check.py $(COMMIT)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[development]'
	touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

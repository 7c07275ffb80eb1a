# One verb per task. PYTHON is the interpreter of the environment that `pip install '.[test]'` went to.
PYTHON ?= .venv/bin/python

.PHONY: test test-heavy lint format

test:
	$(PYTHON) -m pytest

test-heavy:
	$(PYTHON) -m pytest -m heavy

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

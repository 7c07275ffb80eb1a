# One verb per task. PYTHON is the interpreter of the environment that `pip install -e '.[test]'` went to.
PYTHON ?= .venv/bin/python

.PHONY: test test-heavy lint format

test:
	$(PYTHON) -m pytest

test-heavy:
	$(PYTHON) -m pytest -m heavy

# mypy does not follow editable installations: a link makes the checkout the package that it reads.
lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	mkdir -p build/root && ln -sfn ../.. build/root/rootgraft
	MYPYPATH=build/root $(PYTHON) -m mypy

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

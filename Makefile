# One verb per task. PYTHON is the interpreter of the environment that `pip install -e '.[test]'` went to.
PYTHON ?= .venv/bin/python

.PHONY: test test-heavy lint format wheel

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

# dist/ gets a wheel with kernels for all levels of CPUs, tagged with the oldest glibc that has the symbols they need.
wheel:
	rm -rf build/wheel
	ROOTGRAFT_KERNELS=all $(PYTHON) -m pip wheel --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m auditwheel show build/wheel/*.whl
	PATH="$(dir $(abspath $(PYTHON))):$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir dist build/wheel/*.whl

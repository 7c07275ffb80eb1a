# One verb per task. PYTHON is the interpreter of the environment that `pip install -e '.[test]'` went to.
PYTHON ?= .venv/bin/python
ifeq ($(shell command -v $(PYTHON)),)
$(error There is no $(PYTHON). Make it with "python3 -m venv .venv && .venv/bin/pip install -e '.[test]'", or name another: make PYTHON=python3)
endif

.PHONY: test test-heavy lint format docs wheel release lock audit pin-base

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

# build/site gets the documentation as a site with search. A link that leads nowhere is an error.
docs:
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python -m pip install --quiet --requirement deploy/site/requirements.txt
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/python -m mkdocs build --strict --config-file deploy/site/mkdocs.yml

# dist/ gets a wheel with kernels for all levels of CPUs, tagged with the oldest glibc that has the symbols they need.
wheel:
	rm -rf build/wheel
	ROOTGRAFT_KERNELS=all $(PYTHON) -m pip wheel --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m auditwheel show build/wheel/*.whl
	PATH="$(dir $(abspath $(PYTHON))):$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir dist build/wheel/*.whl

# dist/ gets the wheel, the source archive, an SBOM, the locked versions, the section of the changelog, and checksums.
release:
	$(PYTHON) deploy/release.py

# Versions and hashes of what the images install beside torch and what it brings, which are of the index of each image.
lock:
	mkdir -p build
	printf '%s\n' "torch; python_version < '3'" "triton; python_version < '3'" > build/not-locked.txt
	$(PYTHON) -m uv pip compile pyproject.toml --extra otel --extra ebnf --override build/not-locked.txt --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" --output-file deploy/requirements.lock

# The base image by its newest digest, for all platforms, as its registry tells it.
BASE_IMAGE ?= python:3.12-slim-bookworm
pin-base:
	$(PYTHON) deploy/pin_base.py $(BASE_IMAGE)

# Known advisories against lower bounds and locked versions, without a network.
audit:
	$(PYTHON) deploy/audit.py

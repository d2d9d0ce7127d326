# Everything runs in .venv; `make setup` makes it, and every target that needs it asks for it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-all test-browser lint types format embedded-model picture bench dist clean
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready ## make .venv with everything in it

# Reinstalled only when what is asked for changes.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "equicam needs Python 3.11 or newer, got " + sys.version.split()[0] + "; try make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## the main job on the embedded default
	$(BIN)/equicam demo

test: setup ## pass all tests (the slow, gpu and browser ones are run by hand)
	$(BIN)/python -m pytest

test-all: setup ## the slow tests too
	$(BIN)/python -m pytest -m 'not gpu and not browser'

test-browser: setup ## the review page in a real Chromium
	$(BIN)/python -m pytest tests/web -m browser

lint: setup ## ruff, and the arrows between layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: setup ## mypy, strict
	$(BIN)/mypy

format: setup ## let ruff write
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

embedded-model: setup ## train the embedded model anew (minutes)
	$(BIN)/python scripts/embedded_model.py

picture: setup ## draw the README's picture anew
	$(BIN)/python scripts/readme_picture.py

bench: setup ## ours and the peers in one run on this machine's CPU
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/gradient_free.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/scaling.py

dist: setup ## wheel and sdist, each installed into a clean environment and tried there
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[review]"
	.venv-dist/bin/python scripts/try_installed.py
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
	.venv-dist/bin/python scripts/try_installed.py --quick
	rm -rf .venv-dist

clean: ## remove .venv and what was made
	rm -rf .venv .venv-dist demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

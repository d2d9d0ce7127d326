# Everything runs in .venv; `make setup` makes it, and every target that needs it depends on it.
PYTHON ?= python3
# Test processes, each with one thread.
PROCESSES ?= 2
MARKS ?= not slow and not gpu and not browser
BIN := .venv/bin

.PHONY: help setup demo rasters test test-all test-browser fuzz lint size types format docs embedded-model readme-image bench dist clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready ## make .venv with everything in it, equicam and equicam-paper

# Installed again only when the requirements change.
.venv/.ready: pyproject.toml paper/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "equicam needs Python 3.11 or newer, got " + sys.version.split()[0] + "; try make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e paper
	@touch $@

demo: setup ## audit synthetic patches with the embedded model: run, queue, report
	$(BIN)/equicam demo

rasters: setup ## fetch real slides, scenes and radiographs for the tests into .rasters
	$(BIN)/python scripts/fetch_rasters.py

test: setup ## run all tests but those marked slow, gpu or browser
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal -m '$(MARKS)'

test-all: setup ## run the slow tests too
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal -m 'not gpu and not browser'

test-browser: setup ## test the review page in a real Chromium
	$(BIN)/python -m pytest tests/web -m browser

fuzz: setup ## decode 100,000 damaged images and lists with the limits of an audit; FUZZ="--minutes 3" for less
	$(BIN)/python tests/hostile/fuzz.py $(FUZZ)

lint: setup ## run ruff, and check the imports between layers and the words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_words.py

size: setup ## count lines, modules and public names, next to their limits
	$(BIN)/python scripts/size.py

types: setup ## run mypy, strict
	$(BIN)/mypy

format: setup ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## build the documentation site into site/, offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

embedded-model: setup ## train the embedded model again (minutes)
	$(BIN)/python scripts/embedded_model.py

readme-image: setup ## make the README's animation and the image of docs/method.md again (minutes)
	$(BIN)/python scripts/readme_animation.py
	$(BIN)/python scripts/context_image.py

bench: setup ## time us and the peers in one run on this machine's CPU
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/gradient_free.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/scaling.py

dist: setup ## build wheels and sdists, and try equicam's in an environment with its declared dependencies only
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist/paper paper
	$(PYTHON) -m venv .venv-dist
	$(BIN)/python scripts/link_dependencies.py dist/*.whl .venv-dist --extra review
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --no-index "$$(ls dist/*.whl)[review]"
	.venv-dist/bin/python -m pip check
	.venv-dist/bin/python scripts/try_installed.py
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
	.venv-dist/bin/python scripts/try_installed.py --quick
	rm -rf .venv-dist

clean: ## remove .venv and everything that was built
	rm -rf .venv .venv-dist demo dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

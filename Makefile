# Each target does all of its own set-up in .venv; nothing is done twice.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
RUN    := $(VENV)/bin/

.PHONY: install demo test test-slow check clean
install: $(STAMP)

# Editable install with every version pinned by constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.'
	touch $@

$(VENV)/.installed-dev: $(STAMP)
	$(RUN)python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(RUN)equifed demo --out equifed-demo --overwrite

check: $(VENV)/.installed-dev
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

test: check
	$(RUN)pytest -n 2 -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(RUN)pytest -n 2 -m slow

clean:
	rm -rf $(VENV) equifed-demo

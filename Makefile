# Each target does all of its own set-up in .venv; nothing is done twice.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
RUN    := $(VENV)/bin/

VERSIONS ?= both

.PHONY: install hashes demo browser quick test test-slow test-versions bench check names pictures docs clean
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

# pip takes hashes from requirements, not from constraints, and not with an editable install: this is a
# file of its own, for  pip install --require-hashes --no-deps --requirement constraints-hashes.txt
hashes: $(VENV)/.installed-dev
	(echo "# The versions of constraints.txt with the hashes of their files; written by 'make hashes'."; \
	  $(RUN)uv pip compile constraints.txt --generate-hashes --no-deps --no-header --quiet) > constraints-hashes.new
	mv constraints-hashes.new constraints-hashes.txt

# Public names and the README's tables follow from the catalogue.
names: $(VENV)/.installed-dev
	$(RUN)python -m scripts.public_names

# The pictures of the site, drawn by the library.
pictures: $(VENV)/.installed-dev
	$(RUN)python -m scripts.pictures

# The site, in build/site; a warning or a broken link inside is an error. make test builds it, too.
docs: $(VENV)/.installed-dev
	$(RUN)python -m sphinx -W --keep-going -q -E -a -d build/site-doctrees docs build/site

# The report is tested in a real browser: Debian's, if it is not there and this is root.
browser:
	@if ! test -x /usr/bin/chromium -a -x /usr/bin/chromedriver \
	    && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  apt-get update --quiet && \
	  apt-get install --yes --quiet --no-install-recommends chromium chromium-driver; fi

# What to run after every change; chosen by marks alone.
quick: $(VENV)/.installed-dev
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	OMP_NUM_THREADS=1 $(RUN)pytest -n 2 -m "not slow and not long"

# One thread for each of the two processes: small products gain nothing from waiting for each other.
test: check browser
	OMP_NUM_THREADS=1 $(RUN)pytest -n 2 -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(RUN)pytest -n 2 -m slow

# The short tests with the newest and the lowest versions allowed, on every interpreter at hand.
test-versions: $(VENV)/.installed-dev
	UV=$(RUN)uv scripts/test_versions.sh $(VERSIONS) "$(PYTHONS)"

# Ratios of rounds to what they cannot avoid, on one thread; no part of the tests.
bench: $(VENV)/.installed-dev
	$(RUN)python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	OMP_NUM_THREADS=1 $(RUN)pytest -p no:cacheprovider benchmarks/regressions

clean:
	rm -rf $(VENV) $(VENV)-versions equifed-demo

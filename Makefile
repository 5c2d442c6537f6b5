# A fresh machine needs Python 3.11 or newer with pip, make and git; the first target called installs the rest.
#
#   make demo    train on real handwritten digits in two stages; every call starts a new run folder
#   make test    every test that takes seconds; warnings are errors
#   make slow    the tests that take minutes, an hour in all; PART=2/4 runs the third quarter of them
#   make faults  see that tests catch deliberate faults; PART=3/10 takes the fourth tenth of them
#   make check   lint, types and test
#   make docs    the documentation as a site, site/index.html, which opens without a network
#   make compat TORCH=2.15.0    the quick tests on another torch (newest, too), or another TRANSFORMERS
#
# PYTHON chooses the interpreter (make test PYTHON=python3.12), VENV the folder of the environment.

PYTHON ?= python3
VENV ?= .venv
PART ?= 0/1

CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
TWO_AT_A_TIME := --numprocesses 2 --dist worksteal
IN_VENV := VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: demo test slow faults lint types check docs install compat

demo: $(INSTALLED)
	$(IN_VENV) penstock train digits

test: $(INSTALLED)
	$(IN_VENV) scripts/test $(TWO_AT_A_TIME)

slow: $(INSTALLED)
	$(IN_VENV) scripts/test -m slow --part $(PART) --timeout 900 $(TWO_AT_A_TIME)

faults: $(INSTALLED)
	$(IN_VENV) python -m scripts.deliberate_faults --part $(PART)

lint: $(INSTALLED)
	$(IN_VENV) scripts/lint

types: $(INSTALLED)
	$(IN_VENV) scripts/types

check: $(INSTALLED)
	$(IN_VENV) scripts/check

# Strict: a broken link, a page that is in no menu, or a public name without a docstring ends it.
docs: $(DOCS_INSTALLED)
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --clean

install: $(INSTALLED)

# In an environment of its own, outside the checkout; TESTS chooses some of the tests.
compat:
	TORCH="$(TORCH)" TRANSFORMERS="$(TRANSFORMERS)" PYTHON="$(PYTHON)" scripts/compat $(TWO_AT_A_TIME) $(TESTS)

# Each stamp is written last: a step that was interrupted is done again, one that succeeded is not.
$(INSTALLED): $(CREATED) pyproject.toml recipes/pyproject.toml constraints.txt
	"$(VENV)/bin/python" -m pip install --constraint constraints.txt --editable '.[dev]' --editable recipes
	touch "$@"

$(DOCS_INSTALLED): $(INSTALLED)
	"$(VENV)/bin/python" -m pip install --constraint constraints.txt --editable '.[docs]'
	touch "$@"

$(CREATED):
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Penstock needs Python 3.11 or newer and $(PYTHON) is %d.%d; choose another: make PYTHON=python3.12" % sys.version_info[:2])'
	"$(PYTHON)" -m venv --clear "$(VENV)"
	touch "$@"

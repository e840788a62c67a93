# In a fresh clone, `make demo` and `make test` set up everything they need.
# The work is done by scripts/, in Python, so that every step has a log, a time, and a clear error.

PYTHON ?= python3
VENV := .venv
IN_VENV := $(VENV)/bin/python
OPEN ?= 1
CASES ?= due

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint format bench docs docs-links release-check picture clean

help: ## show this list
	@echo "lazyviz: see what a PyTorch cell will do before it does it"
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: ## set up, run notebooks/quickstart.ipynb, show its results (OPEN=0: do not open JupyterLab)
	@$(PYTHON) scripts/prepare_venv.py demo
	@$(IN_VENV) scripts/demo.py --open=$(OPEN)

check: ## for daily work, takes minutes: lint, types, unit tests, a sample of the conformance tests
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) scripts/run_checks.py --daily

test: ## set up, then lint, types, Python, notebook, JavaScript and browser tests (CASES=all: not only today's)
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) scripts/run_checks.py $(if $(filter all,$(CASES)),--every-case)

test-all: ## the same with every conformance sample and library; writes docs/conformance.md, docs/libraries.md
	@$(PYTHON) scripts/prepare_venv.py test-all
	@$(IN_VENV) scripts/run_checks.py --all

lint: ## only the linters and the type checkers
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) scripts/run_checks.py --only lint

format: ## apply ruff's automatic fixes
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) -m ruff check --fix . && $(IN_VENV) -m ruff format .

bench: ## measure speed and memory, also of other tools (QUICK=1: a short run)
	@$(PYTHON) scripts/prepare_venv.py bench
	@$(IN_VENV) benchmarks/run.py $(if $(QUICK),--quick)

docs: ## build the documentation site in out/docs, executing its cells; a warning is an error
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) scripts/run_checks.py --only documentation
	@echo "open out/docs/index.html"

docs-links: ## check all external links of the docs; needs the network
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) -m sphinx -q -b linkcheck -D nb_execution_mode=off docs out/docs-links

release-check: ## build sdist and wheel, install each into an empty environment, and test it there
	@$(PYTHON) scripts/prepare_venv.py test
	@$(IN_VENV) scripts/release_check.py

picture: ## redraw the README's picture with the installed lazyviz
	@$(PYTHON) scripts/prepare_venv.py demo
	@$(IN_VENV) scripts/readme_picture.py

clean: ## remove everything that these commands created, including the virtual environment
	rm -rf $(VENV) out dist build js/node_modules lazyviz/static/widget.js lazyviz/static/widget.css
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# PYTHON=python3 uses an installed environment instead of .venv; then nothing is set up.
VENV := .venv/bin/python
PYTHON ?= $(VENV)
SETUP := $(if $(filter $(VENV),$(PYTHON)),.venv/.installed)
ECHARTS := perf/dashboard/node_modules/.installed
CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
BROWSER := $(and $(CHROMIUM),$(shell command -v npm))
SANITIZERS := memcheck racecheck synccheck initcheck

.DEFAULT_GOAL := help
.PHONY: setup demo test browser-test gpu-test dashboard sanitize lint format clean help

setup: .venv/.installed ## make .venv with everything installed (once)
	@echo "make setup: .venv is ready. To use it: source .venv/bin/activate"

.venv/.installed: pyproject.toml constraints.txt
	@echo "make setup: PyTorch, the CuTe DSL and the tools of the tests go to .venv: some gigabytes, some minutes, once"
	python3 -m venv .venv
	$(VENV) -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "make setup: installed everything in .venv"

demo: $(SETUP) ## a small language model decodes through a paged cache
	$(PYTHON) -m cute_kernels demo

test: lint $(if $(BROWSER),$(ECHARTS)) ## lint, types and every test that needs no GPU
	$(PYTHON) -m pytest -m "not gpu$(if $(BROWSER),, and not browser)" -n 2 --dist worksteal -q
	@echo "make test: passed"
	$(if $(BROWSER),,@echo "The browser tests were NOT run: they need chromium and npm. With both, run: make browser-test")

browser-test: $(SETUP) $(ECHARTS) ## the dashboard in headless Chromium
	$(PYTHON) -m pytest -m browser -q tests/browser

$(ECHARTS): perf/dashboard/package-lock.json
	npm ci --prefix perf/dashboard --ignore-scripts --no-audit --no-fund
	@touch $@

dashboard: $(SETUP) $(ECHARTS) ## docs/dashboard.html from the committed records
	$(PYTHON) -m cute_kernels dashboard --out docs/dashboard.html

gpu-test: $(SETUP) ## the tests that need a GPU
	$(PYTHON) -m pytest -m "gpu and not exclusive" -n 8 -q tests
	$(PYTHON) -m pytest -m "gpu and exclusive" -q tests

# API errors are left out: torch probes the driver for functions that it may lack
sanitize: $(SETUP) ## every variant under each tool of compute-sanitizer
	@command -v compute-sanitizer > /dev/null || { echo "make sanitize: compute-sanitizer of the CUDA toolkit is not on PATH" >&2; exit 1; }
	@failed=; for tool in $(SANITIZERS); do \
		echo "== $$tool"; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(PYTHON) -m tests.sanitize \
			|| failed="$$failed $$tool"; \
	done; \
	if [ -n "$$failed" ]; then echo "make sanitize: FAILED under$$failed"; exit 1; fi
	@echo "make sanitize: 0 reports from $(SANITIZERS)"

lint: $(SETUP) ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(SETUP) ## rewrite sources in the house style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove .venv, caches and build output
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis perf/dashboard/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1: \2/' | column -t -s: -l 2

# One .venv serves everything here. Another interpreter: make PYTHON=python3.12 test (after `make clean`).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: test test-long quickstart lint clean
.DELETE_ON_ERROR:

test: lint
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

test-long: $(VENV)/.dev-installed
	@$(BIN)/python -m pytest -q -m slow || [ $$? -eq 5 ]  # 5: this release has none

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Large pages: a training step on CPUs touches gigabytes of fresh memory, and takes a quarter less time with them.
quickstart: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
quickstart: $(VENV)/.installed
	$(BIN)/python train/finetune.py --config configs/quickstart.yaml
	$(BIN)/python infer/evaluate.py --config configs/quickstart.yaml

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else 1)' || { \
	  echo "jaxtool needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' can't create virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)."; \
	  exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(PIP) -e .
	@touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/.created
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find jaxtool train infer tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# `make demo` and `make test` work on a fresh machine with a Python from 3.11 to 3.13: they make .venv first, and again install into
# it whenever pyproject.toml changes. Choose the Python with PYTHON=...; everything runs on the CPU unless .venv has an accelerator's plugin.
.DELETE_ON_ERROR:
.PHONY: demo docs test test-full lint setup setup-dev clean help again

VENV := .venv
BIN := $(VENV)/bin
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo 'make demo       train the nano SpanNorm model (minutes on a laptop CPU) and draw its loss curve'
	@echo 'make test       lint, types and the default test suite'
	@echo 'make test-full  lint, types, every test, and the mutation check'
	@echo 'make lint       ruff and pyright alone'
	@echo 'make docs       the documentation as a site, in site/ (needs no network; a warning is an error)'
	@echo 'make clean      remove .venv, caches and build output (runs/ stays)'

demo: $(VENV)/base.done
	@$(BIN)/spannorm train nano

lint: $(VENV)/dev.done
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

test: lint
	@$(BIN)/pytest -q -n 2

test-full: lint
	@$(BIN)/pytest -q -n 2 --full
	@$(BIN)/python tests/mutations.py

docs: $(VENV)/dev.done
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo 'site/index.html'

setup: $(VENV)/base.done
setup-dev: $(VENV)/dev.done

# A Python that is asked for by name is looked at each time: .venv is made anew where it has another one.
$(VENV)/base.done: pyproject.toml $(if $(PYTHON),again)
	@scripts/venv.sh $(VENV) .
	@touch $@

$(VENV)/dev.done: pyproject.toml $(if $(PYTHON),again)
	@scripts/venv.sh $(VENV) '.[dev]'
	@touch $(VENV)/base.done $@

clean:
	rm -rf $(VENV) site .jax_cache .ruff_cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

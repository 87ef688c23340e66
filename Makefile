# Every target makes the virtual environment that it needs.

PYTHON ?= python3
PARAMIKO ?=
VENV := .venv$(PARAMIKO)
BIN := $(VENV)/bin
PYTEST_ARGS ?=
EXAMPLES ?= 50
SEED ?= 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 20

demo: $(VENV)/done ## a homelab, the daemon and the page on loopback
	@$(BIN)/python tests/homelab.py

run: $(VENV)/done ## the daemon, with the settings of the environment or ENV_FILE=…
	@$(BIN)/python waker.py $(if $(ENV_FILE),--env-file $(ENV_FILE))

dist: dist/waker ## one file, with the page inside

dist/waker: waker.py ui.html
	mkdir -p dist
	sed '/^PAGE: Final = r"""$$/r ui.html' waker.py > $@.part
	chmod 755 $@.part
	mv $@.part $@

test: $(VENV)/done ## all tests; those that lack a program or root are skipped
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/done ## invented requests and inputs, EXAMPLES=50 of each, SEED=1
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_properties.py \
		--examples $(EXAMPLES) --hypothesis-seed $(SEED)
	$(BIN)/python tests/fuzz.py --examples $(EXAMPLES) --seed $(SEED)

siege: $(VENV)/done ## the daemon under attack, 20 minutes; ATTACK=flood for some
	$(BIN)/python tests/siege.py $(if $(ATTACK),"$(ATTACK)")

test-vm: $(VENV)/done ## real machines with encrypted disks, in QEMU; wants root
	$(BIN)/python -m pytest $(PYTEST_ARGS) --numprocesses 2 --maxschedchunk 1 tests/vm

test-paramiko: $(VENV)/done ## the unlock tests alone, with PARAMIKO=2.12.0 for example
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_unlock.py

screenshots: $(VENV)/done ## the page in every state, to tests/screenshots/
	$(BIN)/python tests/screenshots.py

lint: $(VENV)/done ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy waker.py tests/*.py tests/vm/*.py

clean: ## remove what the other targets made
	rm -rf .venv* .vm dist .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		__pycache__ tests/__pycache__ tests/vm/__pycache__

# With PARAMIKO=VERSION, an environment of its own has that version.
$(VENV)/done: tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	$(if $(PARAMIKO),$(BIN)/pip install --quiet paramiko==$(PARAMIKO))
	touch $@

.PHONY: help demo run dist test fuzz siege screenshots test-vm test-paramiko lint clean

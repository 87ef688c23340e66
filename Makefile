# To try waker, to build the one file, and to install it. The targets for tests are in
# tests/targets.mk.

PYTHON ?= python3
PARAMIKO ?=
VENV := .venv$(PARAMIKO)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check
# For packagers: the file system that becomes the package, and a folder in it.
DESTDIR ?=
PREFIX ?= /usr/local

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /make \1	/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/run ## try waker with a simulated server; LISTEN=0.0.0.0:8080
	@$(BIN)/python tests/support/homelab.py $(LISTEN)

run: $(VENV)/run ## run the daemon, with settings from the environment or ENV_FILE=FILE
	@$(BIN)/python waker.py $(if $(ENV_FILE),--env-file $(ENV_FILE))

dist: ## build the one file to copy, dist/waker
	@mkdir -p dist
	@$(PYTHON) -IS box/pack.py . dist/waker
	@$(if $(filter dist,$(MAKECMDGOALS)),echo "Now install it on the box: see step 1 in README.md")

install: dist ## install waker on this computer; or, with DESTDIR= and PREFIX=, for a package
ifeq ($(DESTDIR),)
	$(if $(filter-out /usr/local,$(PREFIX)),$(error PREFIX needs DESTDIR))
	@$(PYTHON) dist/waker install
else
	install -D -m 755 dist/waker "$(DESTDIR)$(PREFIX)/bin/waker"
	sed 's|/usr/local/bin|$(PREFIX)/bin|' waker.service >dist/waker.service
	install -D -m 644 -t "$(DESTDIR)$(PREFIX)/lib/systemd/system" dist/waker.service
endif

# A small virtual environment, to run waker. Each PARAMIKO=VERSION has its own.
$(VENV)/run: tests/run_requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(PARAMIKO),paramiko==$(PARAMIKO),-r $<)
	touch $@

include tests/targets.mk

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*/\1/p' $(MAKEFILE_LIST))

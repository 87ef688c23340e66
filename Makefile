# Every target makes the virtual environment that it needs.

PYTHON ?= python3
PARAMIKO ?=
VENV := .venv$(PARAMIKO)
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# More than there are processors: most tests wait, for the most part; not the browser's.
PARALLEL := --numprocesses 14 --maxschedchunk 1
INIT ?= $(if $(wildcard /etc/rc.common),procd,systemd)
PREFIX ?= $(if $(filter procd,$(INIT)),/usr,/usr/local)
$(if $(filter /%,$(PREFIX)),,$(error PREFIX must begin with /))
DESTDIR ?=
UNITS := $(PREFIX)/lib/systemd/system
CONFIG := $(DESTDIR)/etc/waker
EXAMPLES ?= 200
SEED ?= 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 20

demo: $(VENV)/done ## a homelab, the daemon and the page on loopback
	@$(BIN)/python tests/homelab.py

run: $(VENV)/done ## the daemon, with the settings of the environment or ENV_FILE=…
	@$(BIN)/python waker.py $(if $(ENV_FILE),--env-file $(ENV_FILE))

dist: dist/waker ## one file, with the page inside

dist/waker: always
	mkdir -p dist
	! grep '"""' ui.html # it would end the text too early
	sed '/^PAGE: Final = r"""$$/r ui.html' waker.py > $@.part
	grep -q '^</html>$$' $@.part
	chmod 755 $@.part
	mv -f $@.part $@

install: install-$(INIT) ## as a service of systemd or procd; PREFIX, DESTDIR, INIT
	test -e "$(CONFIG)" || install -d -m 700 "$(CONFIG)"
	test -e "$(CONFIG)/waker.env" -o -L "$(CONFIG)/waker.env" || \
		install -m 600 waker.env.example "$(CONFIG)/waker.env"

install-program: dist/waker
	install -d "$(DESTDIR)$(PREFIX)/bin"
	install -m 755 dist/waker "$(DESTDIR)$(PREFIX)/bin/waker"

install-systemd: install-program
	install -d "$(DESTDIR)$(UNITS)"
	sed 's|/usr/local/bin|$(PREFIX)/bin|' waker.service > dist/waker.service
	install -m 644 dist/waker.service "$(DESTDIR)$(UNITS)/waker.service"

install-procd: install-program
	install -d "$(DESTDIR)/etc/init.d"
	sed 's|/usr/bin|$(PREFIX)/bin|' waker.init > dist/waker.init
	install -m 755 dist/waker.init "$(DESTDIR)/etc/init.d/waker"

uninstall: ## removes all of that but the configuration
	rm -f "$(DESTDIR)$(PREFIX)/bin/waker" "$(DESTDIR)$(UNITS)/waker.service" \
		"$(DESTDIR)/etc/init.d/waker"
	@echo "$(CONFIG) is left; it has your settings and keys."

test: $(VENV)/done ## all tests; those that lack a program or root are skipped
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS) --ignore tests/test_page.py
	$(BIN)/python -m pytest --numprocesses 4 $(PYTEST_ARGS) tests/test_page.py

fuzz: $(VENV)/done ## invented requests and inputs, EXAMPLES=200 of each, SEED=1
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_properties.py \
		--examples $(EXAMPLES) --hypothesis-seed $(SEED)
	$(BIN)/python tests/fuzz.py --examples $(EXAMPLES) --seed $(SEED)

siege: $(VENV)/done ## the daemon under attack, 20 minutes; ATTACK=flood for some
	$(BIN)/python tests/siege.py $(if $(ATTACK),"$(ATTACK)")

test-vm: $(VENV)/done ## real machines with encrypted disks, in QEMU; wants root
	$(BIN)/python -m pytest $(PYTEST_ARGS) --numprocesses 2 --maxschedchunk 1 tests/vm

test-paramiko: $(VENV)/done ## what needs paramiko alone, with PARAMIKO=2.12.0 for example
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS) tests/test_unlock.py \
		tests/test_check.py tests/test_openwrt.py

bench: .venv-bench/done ## waker beside its peers, 10 minutes; wants root; JSON=FILE
	.venv-bench/bin/python tests/bench.py $(if $(JSON),--json "$(JSON)")

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

.venv-bench/done: tests/bench_requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

.PHONY: always help demo run dist install install-program install-systemd install-procd \
	uninstall test fuzz siege bench screenshots test-vm test-paramiko lint clean

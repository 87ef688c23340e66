# Each target creates the virtual environment that it needs: a small one to run waker, or
# one ten times as big to test it.

PYTHON ?= python3
PARAMIKO ?=
VENV := .venv$(PARAMIKO)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check
PYTEST_ARGS ?=
# Some tests need root, which an ordinary user may be in namespaces.
AS_ROOT := tests/enter $(BIN)/python
# More than there are processors, because most tests mostly wait.
PARALLEL := --numprocesses 10 --dist loadgroup
UNLOCKS := $(addprefix tests/test_promises.py::test_, only_the_initrds_own_words_decide \
	each_outcome_reaches_the_client_and_the_status)
# Tests start hundreds of processes, which should not compile everything again.
export PYTHONDONTWRITEBYTECODE :=
INIT ?= $(if $(wildcard /etc/rc.common),procd,systemd)
$(if $(filter systemd procd,$(INIT)),,$(error INIT must be systemd or procd))
PREFIX ?= $(if $(filter procd,$(INIT)),/usr,/usr/local)
$(if $(filter /%,$(PREFIX)),,$(error PREFIX must begin with /))
DESTDIR ?=
UNITS := $(PREFIX)/lib/systemd/system
CONFIG := $(DESTDIR)/etc/waker
KEY := $(CONFIG)/ssh_key
CARD := dist/card/waker
EXAMPLES ?= 200
SEED ?= 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile | expand -t 20

demo: $(VENV)/run ## try waker with a make-believe server; LISTEN=0.0.0.0:8080
	@$(BIN)/python tests/support/homelab.py $(LISTEN)

run: $(VENV)/run ## run the daemon, with settings from the environment or ENV_FILE=FILE
	@$(BIN)/python waker.py $(if $(ENV_FILE),--env-file $(ENV_FILE))

dist: dist/waker ## build the one file to install, dist/waker

dist/waker: always
	mkdir -p dist
	! grep '"""' ui.html # would end the string too early
	sed '/^PAGE: Final = r"""$$/r ui.html' waker.py > $@.part
	grep -q '^</html>$$' $@.part
	chmod 755 $@.part
	mv -f $@.part $@

card: dist/waker ## make what a Raspberry Pi's SD card needs, dist/card
	install -d -m 700 $(CARD)
	install -m 755 box/raspberry-pi/vendor-data dist/card
	install -m 755 dist/waker $(CARD)
	install -m 644 waker.service $(CARD)
	test -e $(CARD)/waker.env || install -m 600 waker.env.example $(CARD)/waker.env
	test -e $(CARD)/ssh_key || ssh-keygen -q -t ed25519 -N "" -C waker -f $(CARD)/ssh_key
	@echo; echo "dist/card is ready. Your server needs this public key:"
	@echo; sed "s/^/    /" $(CARD)/ssh_key.pub
	@echo; echo "Next: see docs/raspberry-pi.md"

install: install-$(INIT) ## install the service; INIT=systemd or procd, PREFIX=, DESTDIR=
	test -e "$(CONFIG)" || install -d -m 700 "$(CONFIG)"
	test -e "$(CONFIG)/waker.env" -o -L "$(CONFIG)/waker.env" || \
		install -m 600 waker.env.example "$(CONFIG)/waker.env"
# A package, made with DESTDIR, must not contain a key: everybody would have the same.
ifeq ($(DESTDIR),)
	@if test -e "$(KEY)" -o -L "$(KEY)"; then \
		echo; echo "Installed. If waker is running, restart it now."; \
	else \
		ssh-keygen -q -t ed25519 -N "" -C waker -f "$(KEY)" || exit; \
		echo; echo "Installed. Your server needs this public key:"; \
		echo; sed "s/^/    /" "$(KEY).pub"; \
		echo; echo "Next: prepare the server (see README.md), fill in"; \
		echo "$(CONFIG)/waker.env, and run: sudo waker check"; \
	fi
endif

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

uninstall: ## remove the service, but not its settings and keys; PREFIX=, DESTDIR=
	rm -f "$(DESTDIR)$(PREFIX)/bin/waker" "$(DESTDIR)$(UNITS)/waker.service" \
		"$(DESTDIR)/etc/init.d/waker"
	@for prefix in /usr/local /usr; do \
		! test -e "$(DESTDIR)$$prefix/bin/waker" || \
		echo "$(DESTDIR)$$prefix/bin/waker is still there. To remove it:" \
			"make uninstall PREFIX=$$prefix"; \
	done
	@echo "Your settings and keys are still in $(CONFIG)."

test: $(VENV)/done ## run all tests, or T=tests/test_watch.py, or T='-k broadcast'
ifdef T
	$(AS_ROOT) -m pytest --numprocesses 9 --maxschedchunk 1 $(PYTEST_ARGS) $(T)
else
	$(AS_ROOT) -m pytest $(PARALLEL) $(PYTEST_ARGS)
endif

test-browsers: $(VENV)/done .venv-qt6.5/done .venv-qt6.2/done ## test the page in other engines
	$(AS_ROOT) -m pytest --numprocesses 3 --maxschedchunk 1 $(PYTEST_ARGS) \
		-m browsers tests/test_browsers.py tests/test_page.py

fuzz: $(VENV)/done ## test with random requests and inputs; EXAMPLES=200, SEED=1
	EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(PYTEST_ARGS) \
		tests/load/properties.py tests/load/fuzz.py --hypothesis-seed $(SEED)

siege: $(VENV)/done ## attack the daemon for 15 minutes, as root; ATTACK=heads
	$(BIN)/python tests/load/siege.py 3 $(if $(ATTACK),"$(ATTACK)")

breaks: $(VENV)/done ## break each promise: does a test notice? BREAK="some words"
	$(AS_ROOT) tests/breaks.py $(BREAK)

test-vm: $(VENV)/done ## unlock encrypted servers in QEMU, as root
	$(BIN)/python -m pytest $(PYTEST_ARGS) --numprocesses 2 --maxschedchunk 1 tests/vm

test-unstable: $(VENV)/done ## unlock today's Debian unstable in QEMU, as root
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/vm/unstable.py

test-paramiko: $(VENV)/done ## test what uses paramiko; PARAMIKO=2.12.0
	$(AS_ROOT) -m pytest $(PARALLEL) $(PYTEST_ARGS) tests/test_unlock.py \
		tests/test_check.py tests/test_openwrt.py $(UNLOCKS)

bench: $(VENV)/done dist/waker ## compare waker with an empty server and ssh, as root
	$(BIN)/python tests/load/bench.py

screenshots: $(VENV)/done ## take pictures of the page in every state
	mkdir -p dist/screenshots docs/images
	$(AS_ROOT) -m pytest --numprocesses 3 $(PYTEST_ARGS) -k every_state \
		--screenshots dist/screenshots tests/test_page.py
	cp "dist/screenshots/PIN, light.png" docs/images/sign-in.png
	cp "dist/screenshots/off, light.png" docs/images/off.png
	cp "dist/screenshots/starting, light.png" docs/images/starting.png
	cp "dist/screenshots/up, light.png" docs/images/up.png

lint: $(VENV)/done ## run ruff, mypy and shellcheck
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy waker.py tests
	shellcheck tests/enter server/dracut/46initrd-ssh/cryptroot-unlock \
		server/dracut/46initrd-ssh/module-setup.sh
	shellcheck --shell=dash waker.init box/raspberry-pi/vendor-data tests/support/initrds/*.sh

clean: ## remove what the other targets made
	rm -rf .venv* .vm dist .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		__pycache__ tests/__pycache__ tests/vm/__pycache__

# PARAMIKO=VERSION uses a virtual environment of its own, with that version.
$(VENV)/run: tests/run_requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(PARAMIKO),paramiko==$(PARAMIKO),-r $<)
	touch $@

$(VENV)/done: tests/requirements.txt $(VENV)/run
	$(PIP) -r $<
	touch $@

# Old Chromiums, each in an environment of its own.
.venv-qt%/done: tests/support/browsers/qt%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check --no-deps -r $<
	touch $@

.PHONY: always help demo run dist card install install-program install-systemd \
	install-procd uninstall test test-browsers fuzz siege breaks bench screenshots test-vm \
	test-unstable test-paramiko lint clean

# To install waker and to try it. Targets for developers are in tests/targets.mk.

PYTHON ?= python3
PARAMIKO ?=
VENV := .venv$(PARAMIKO)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check
INIT ?= $(if $(wildcard /etc/rc.common),procd,systemd)
$(if $(filter systemd procd,$(INIT)),,$(error INIT must be systemd or procd))
PREFIX ?= $(if $(filter procd,$(INIT)),/usr,/usr/local)
$(if $(filter /%,$(PREFIX)),,$(error PREFIX must begin with /))
$(if $(word 2,$(PREFIX)),$(error PREFIX must not contain spaces))
DESTDIR ?=
PROGRAM := $(DESTDIR)$(PREFIX)/bin/waker
UNITS := $(DESTDIR)$(PREFIX)/lib/systemd/system
CONFIG := $(DESTDIR)/etc/waker
KEY := $(CONFIG)/ssh_key
CARD := dist/card/waker
# The Python that will run the program compiles it, unless it is on another computer.
COMPILE := $(if $(DESTDIR)$(filter procd,$(INIT)),,--compile)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/run ## try waker with a make-believe server; LISTEN=0.0.0.0:8080
	@$(BIN)/python tests/support/homelab.py $(LISTEN)

run: $(VENV)/run ## run the daemon, with settings from the environment or ENV_FILE=FILE
	@$(BIN)/python waker.py $(if $(ENV_FILE),--env-file $(ENV_FILE))

dist: ## build the one file to copy, dist/waker
	mkdir -p dist
	$(PYTHON) -IS box/pack.py . dist/waker

card: dist ## make what a Raspberry Pi's SD card needs, dist/card
	install -d -m 700 $(CARD)
	install -m 755 box/raspberry-pi/vendor-data dist/card
	install -m 755 dist/waker $(CARD)
	install -m 644 waker.service box/pack.py $(CARD)
	test -e $(CARD)/waker.env || install -m 600 waker.env.example $(CARD)/waker.env
	test -e $(CARD)/ssh_key || ssh-keygen -q -t ed25519 -N "" -C waker -f $(CARD)/ssh_key
	@echo; echo "dist/card is ready. This is waker's public key:"
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
		echo; echo "Installed. This is waker's public key:"; \
		echo; sed "s/^/    /" "$(KEY).pub"; \
		echo; echo "Next, prepare the server, without sudo (see README.md):"; \
		echo; echo "    waker prepare me@192.168.1.20"; \
	fi
endif

install-program: dist
	$(or $(wildcard /usr/bin/python3),$(PYTHON)) -IS box/pack.py $(COMPILE) \
		dist/waker dist/installed
	install -D -m 755 dist/installed "$(PROGRAM).new"
	mv -f "$(PROGRAM).new" "$(PROGRAM)" # a running waker starts it at every unlock

install-systemd: install-program
	sed 's|/usr/local/bin|$(PREFIX)/bin|' waker.service > dist/waker.service
	install -D -m 644 dist/waker.service "$(UNITS)/waker.service"

install-procd: install-program
	sed 's|/usr/bin|$(PREFIX)/bin|' waker.init > dist/waker.init
	install -D -m 755 dist/waker.init "$(DESTDIR)/etc/init.d/waker"

server: ## prepare a server; SERVER=me@192.168.1.20, CONFIG=, UNDO=1, OPTIONS=--yes
	@$(PYTHON) -B -m box prepare --config "$(CONFIG)" "$(SERVER)" \
		$(if $(UNDO),--undo) $(OPTIONS)

install-notify: ## send messages to your phone when the server waits and is up; PREFIX=
	$(if $(DESTDIR),$(error install-notify starts a service here: leave out DESTDIR))
	@box/notify/install "$(PREFIX)"

uninstall: ## remove the service, but not its settings and keys; PREFIX=, DESTDIR=
	@if test -e "$(UNITS)/waker-notify.timer"; then \
		test -n "$(DESTDIR)" || systemctl disable --quiet --now waker-notify.timer; \
		rm -rf "$(PROGRAM)-notify" "$(UNITS)"/waker-notify.* "$(CONFIG)"/notify_url* \
			"$(DESTDIR)/var/lib/private/waker-notify" "$(DESTDIR)/var/lib/waker-notify"; \
	fi
	rm -f "$(PROGRAM)" "$(UNITS)/waker.service" "$(DESTDIR)/etc/init.d/waker"
	@for prefix in /usr/local /usr; do \
		! test -e "$(DESTDIR)$$prefix/bin/waker" || \
		echo "$(DESTDIR)$$prefix/bin/waker is still there. To remove it:" \
			"make uninstall PREFIX=$$prefix"; \
	done
	@echo "Your settings and keys are still in $(CONFIG)."

# A small virtual environment, to run waker. PARAMIKO=VERSION has one of its own.
$(VENV)/run: tests/run_requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(PARAMIKO),paramiko==$(PARAMIKO),-r $<)
	touch $@

include tests/targets.mk

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))

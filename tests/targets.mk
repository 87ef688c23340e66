# To change waker and to test it. Makefile includes this; `make help` lists the targets.

# Tests start hundreds of processes, which should not compile everything again.
export PYTHONDONTWRITEBYTECODE :=
# Some tests need root. tests/enter makes an ordinary user root in namespaces.
PYTEST := tests/enter $(BIN)/python -m pytest $(PYTEST_ARGS)
# More processes than processors, because most tests mostly wait.
ALL := --numprocesses 10 --dist loadgroup
FEW := --numprocesses 9 --maxschedchunk 1
QUICK := -m "not browsers and not slow"

test: $(VENV)/done ## run the quick tests, or T=tests/test_watch.py, or T='-k broadcast'
	$(PYTEST) $(if $(T),$(FEW) $(T),$(ALL) $(QUICK))

test-all: $(VENV)/done ## run all but the tests below, as root
	$(PYTEST) $(ALL)

test-browsers: $(VENV)/done .venv-qt6.5/done .venv-qt6.2/done ## run slow tests of the page, also in other engines
	$(PYTEST) --numprocesses 3 --maxschedchunk 1 -m browsers \
		tests/test_browsers.py tests/test_page.py

# Three guests, even on two processors, because they often wait.
test-vm: $(VENV)/done ## unlock encrypted servers in QEMU, as root
	$(BIN)/python -m pytest $(PYTEST_ARGS) --numprocesses 3 --maxschedchunk 1 tests/vm

test-servers: $(VENV)/done ## prepare bare servers in QEMU, as root; T='-k bare-12'
	$(BIN)/python -m pytest $(PYTEST_ARGS) --capture=no $(T) tests/vm/servers.py

test-arm64: $(VENV)/done ## install and use waker on Debian for arm64 in QEMU, as root
	$(BIN)/python -m pytest $(PYTEST_ARGS) --no-skip tests/vm/arm64.py

test-unstable: $(VENV)/done ## unlock today's Debian unstable in QEMU, as root
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/vm/unstable.py

test-paramiko: $(VENV)/done ## test what uses paramiko; PARAMIKO=2.12.0
	$(PYTEST) $(ALL) tests/test_unlock.py tests/test_check.py tests/test_initrds.py \
		tests/test_openwrt.py

fuzz: $(VENV)/done ## test with random requests and inputs; EXAMPLES=200, SEED=1
	EXAMPLES=$(or $(EXAMPLES),200) SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest $(PYTEST_ARGS) tests/load/properties.py tests/load/fuzz.py

siege: $(VENV)/done ## attack the daemon for 15 minutes, as root; ATTACK=heads
	$(BIN)/python tests/load/siege.py 3 $(if $(ATTACK),"$(ATTACK)")

bench: $(VENV)/done dist ## compare waker with a bare http.server and ssh, as root
	$(BIN)/python tests/load/bench.py

breaks: $(VENV)/done ## break each promise: does a test notice? BREAK="some words"
	tests/enter $(BIN)/python tests/breaks.py $(BREAK)

screenshots: $(VENV)/done ## take pictures of the page in every state
	@FONTCONFIG_FILE=tests/support/browsers/fonts.conf fc-match Inter | grep -q Inter || \
		{ echo "need the font Inter (package fonts-inter)"; false; }
	mkdir -p dist/screenshots docs/images
	$(PYTEST) --numprocesses 3 -m browsers -k every_state --screenshots dist/screenshots \
		tests/test_page.py
	cp "dist/screenshots/PIN, light.png" docs/images/sign-in.png
	cp "dist/screenshots/off, light.png" docs/images/off.png
	cp "dist/screenshots/starting, light.png" docs/images/starting.png
	cp "dist/screenshots/up, light.png" docs/images/up.png

lint: $(VENV)/done ## run ruff, mypy and shellcheck
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy waker.py box tests server
	shellcheck tests/enter $(addprefix server/dracut/46initrd-ssh/,\
		clean-card cryptroot-unlock module-setup.sh) \
		server/dracut/99initrd-ssh-last/module-setup.sh $(addprefix server/,\
		probes.sh examine */build */host-key system/etc/kernel/postrm.d/waker \
		initramfs-tools/etc/initramfs-tools/scripts/init-bottom/waker)
	shellcheck --shell=dash waker.init server/remote.sh \
		tests/support/initrds/*.sh box/install-packages box/notify/notify

clean: ## remove what the other targets made
	rm -rf .venv* .vm .vm-arm64 .vm-bare .hypothesis .*_cache dist
	find . -name __pycache__ -prune -exec rm -r {} +

# A virtual environment that is ten times as big, to test waker.
$(VENV)/done: tests/requirements.txt $(VENV)/run
	$(PIP) -r $<
	touch $@

# Old Chromiums, each in an environment of its own.
.venv-qt%/done: tests/support/browsers/qt%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check --no-deps -r $<
	touch $@

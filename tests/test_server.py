"""`prepare.py`: its plan for recorded servers, and what it does to simulated ones."""

import json
import re
import subprocess
import sys

import prepare
import pytest
from conftest import CHECKOUT
from recorded import GRUB, GRUB_KERNEL, TABLE, find, probed
from simulated import (
    CONF,
    DROPBEAR,
    KEY,
    KEYS,
    LIMITED,
    MARKED,
    MODULE,
    OWN_KEY,
    PROGRAM,
    RECORD,
    STATIC,
    Server,
    answers,
)
from terminal import Terminal


def plan(**recordings: str) -> dict[str, str]:
    """Return what each file, or package, of a plan is to be."""
    facts = find(**recordings)
    files = prepare.read_files(facts.builder)
    return {c.name: c.text for c in prepare.make_plan(facts, KEY, "menu", files)}


# ---- What is written ----


def test_the_initrd_gets_its_address_on_one_card() -> None:
    """Unless the owner has given it the same address."""
    settings = [
        prepare.MARK,
        "# A line that begins with # gives way to your own setting.",
        STATIC,
        "BOOTIF=01-52-54-00-12-34-56",
        'export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    assert plan(network="bridge")[CONF].splitlines() == settings
    settings[2] = f"#{STATIC}"
    assert plan(own_ip=f"{STATIC}::eth0")[CONF].splitlines() == settings


def test_dracuts_network_is_that_of_one_card() -> None:
    text = plan(builder="dracut", network="bridge")
    assert text["/etc/initrd-ssh/lan.network"].splitlines() == [
        prepare.MARK,
        "[Match]",
        "PermanentMACAddress=52:54:00:12:34:56",
        "",
        "[Network]",
        "Address=192.168.1.20/24",
        "Gateway=192.168.1.1",
    ]
    assert text["/etc/dracut.conf.d/initrd-ssh.conf"].splitlines() == [
        prepare.MARK,
        'add_dracutmodules+=" initrd-ssh "',
        'hostonly="no"',
        'add_drivers+=" vmxnet3 "',
    ]
    assert f"{MODULE}/module-setup.sh" in text
    assert text[f"{MODULE}/sshd_config"].startswith("Port 2222\n")
    restricted = f'restrict,command="/usr/bin/cryptroot-unlock" {KEY}\n'
    assert text["/etc/initrd-ssh/authorized_keys"] == restricted


@pytest.mark.parametrize("builder", ["initramfs-tools", "dracut"])
def test_settings_come_before_packages(builder: str) -> None:
    """And the kept image before all. Files in /etc, but keys, say who wrote them."""
    facts, texts = find(builder=builder), plan(builder=builder)
    kept = f"/boot/initrd.img-{facts.kept}.before-waker"
    first, second, *files = texts
    if builder == "dracut":  # it would build no image without the package
        assert files.pop() == "/etc/dracut.conf.d/initrd-ssh.conf"
    one, other = files[-2:]
    del files[-2:]
    assert [first, second] == [kept, "/boot/grub/custom.cfg"]
    assert [one, other] == facts.missing
    assert all(name.startswith("/") for name in files)
    assert not re.findall(r"@#?[a-z ]+@", "".join(texts.values()))
    for name in files:
        if name.startswith("/etc") and not name.endswith("authorized_keys"):
            assert prepare.MARK in texts[name].splitlines()[:2], name


def test_wake_on_lan_is_set_at_the_start_and_at_the_end() -> None:
    unit = plan()["/etc/systemd/system/waker-wake.service"].replace("\\\n", "")
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["ExecStart"] == values["ExecStop"]
    assert values["RemainAfterExit"] == "yes"  # or nothing is run at the end
    assert values["Environment"] == "mac=52:54:00:12:34:56"  # whatever its name is


def test_the_kept_image_has_the_entry_of_its_kernel() -> None:
    entry = prepare.make_menu({"grub": GRUB, "menu": ""}, GRUB_KERNEL)
    lines = [line.split() for line in entry.splitlines()]
    assert ["initrd", f"/initrd.img-{GRUB_KERNEL}.before-waker"] in lines
    (linux,) = [line for line in lines if line[0] == "linux"]
    assert linux[1:3] == [f"/vmlinuz-{GRUB_KERNEL}", "root=/dev/mapper/guest--vg-root"]
    assert entry.startswith(
        f"{prepare.MARK}\nmenuentry 'The initrd from before waker' {{\n"
    )
    assert entry.endswith("}\n")
    assert entry.count("{") == entry.count("}") == 1
    # Beside the processor's microcode.
    ucode = GRUB.replace("\tinitrd\t", "\tinitrd\t/intel-ucode.img ")
    entry = prepare.make_menu({"grub": ucode, "menu": ""}, GRUB_KERNEL)
    assert f"initrd\t/intel-ucode.img /initrd.img-{GRUB_KERNEL}.before-waker\n" in entry
    # In place of the one that waker 3.1 made.
    old = "# Written by waker's prepare.py. `make server UNDO=1` removes it."
    menus = [
        {"grub": GRUB, "menu": entry.replace(prepare.MARK, mark)}
        for mark in (prepare.MARK, old)
    ]
    entries = {prepare.make_menu(menu, GRUB_KERNEL) for menu in menus}
    assert entries == {prepare.make_menu({"grub": GRUB, "menu": ""}, GRUB_KERNEL)}
    # None if the owner has entries of his own, or GRUB none for this kernel.
    owners = {"grub": GRUB, "menu": "menuentry 'mine' {}\n"}
    assert prepare.make_menu(owners, GRUB_KERNEL) == ""
    assert prepare.make_menu({"grub": "", "menu": ""}, GRUB_KERNEL) == ""
    assert prepare.make_menu({"grub": GRUB, "menu": ""}, "6.1.0-4") == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", LIMITED),
        (OWN_KEY, f"{OWN_KEY}\n{LIMITED}"),  # no last newline: no key is joined
        (f"{OWN_KEY}\n", f"{OWN_KEY}\n{LIMITED}"),
        (f"{KEY}\n{OWN_KEY}\n", f"{LIMITED}{OWN_KEY}\n"),  # as waker 3.0 wrote it
        (f"{KEY}\n{LIMITED}", LIMITED),  # the first line would have won
        (f'from="192.168.1.2",{LIMITED}', f'from="192.168.1.2",{LIMITED}'),
        (f"# {KEY}\n", f"# {KEY}\n{LIMITED}"),
        (LIMITED, LIMITED),
    ],
    ids=range(8),
)
def test_wakers_key_can_only_unlock_and_other_keys_stay(
    before: str, after: str
) -> None:
    assert prepare.put_key(before, LIMITED) == after


# ---- What it does to a simulated server ----

WRONG_CALLS = {
    f"'{KEY}'": "you did not answer y",  # there is no terminal
    f"--yes '{KEY[:-30]}'": "needs waker's whole public key",
    "--yes": "needs waker's whole public key",
    f"--yes --interface eth9 '{KEY}'": "no card eth9. It has eth0",
}


def test_a_refusal_changes_nothing(server: Server) -> None:
    before = server.files()

    def refuses(reason: str, arguments: str = f"--yes '{KEY}'") -> None:
        said = server.prepare(arguments, check=False)
        words = f"Nothing was changed on this server: .*{re.escape(reason)}"
        assert re.search(f"(?m)^{words}", said), (reason, said)

    for arguments, reason in WRONG_CALLS.items():
        refuses(reason, arguments)
    server.run("mount -o remount,size=20M /boot")
    refuses(" MiB free")
    server.set(**probed(images="vmlinuz-6.1.0-56-cloud-amd64\n"))
    refuses("an initrd in /boot to keep")
    assert server.files() == before


WAKES = "#!/bin/sh\nprintf '\\tSupports Wake-on: pumbg\\n\\tWake-on: d\\n'"


def test_it_shows_what_it_will_do_and_asks(server: Server) -> None:
    bare = server.files()
    for answer in ("n", "y"):
        assert server.files() == bare
        terminal = Terminal(server.enter(f"{PROGRAM} '{KEY}'"))
        terminal.answer("Go on? [y/N]", answer)
        assert terminal.end() == (answer == "n"), terminal.printed
    found, plan, result = re.split(r"This will:|Go on\?", terminal.printed)
    assert "\n    network card: eth0 (52:54:00:12:34:56), 192.168.1.20/24, r" in found
    assert f"\n    limit waker's key to unlocking, with a line in {KEYS}\n" in plan
    assert "\n    examine the initrd of each kernel" in plan
    assert "which takes minutes\n" in plan
    settings, warning = result.split("\nWARNING: ")
    assert warning.startswith("the driver of eth0 offers no Wake-on-LAN, so waker can")
    assert "\nPut these lines into waker.env:\nWAKER_HOMELAB_MAC=" in settings
    server.write("/usr/sbin/ethtool", WAKES, 0o755)
    by_dhcp = '"scope":"global","dynamic":true'
    server.set(links=probed()["links"].replace('"scope":"global"', by_dhcp))
    said = server.prepare()
    assert "WARNING" not in said
    *_, last = said.splitlines()
    assert last.startswith("TO DO: reserve 192.168.1.20 for 52:54:00:12:34:56 in your")
    assert f"\n    take waker's key out of {KEYS}\n" in server.undo()


def test_the_card_keeps_wake_on_lan_from_now_on(server: Server) -> None:
    server.run("cp $(command -v systemctl) .")
    script = f'echo "$@" >>{server.folder}/asked; exec {server.folder}/systemctl "$@"'
    server.write("/usr/bin/systemctl", f"#!/bin/sh\n{script}\n", 0o755)
    for run in (server.prepare, server.prepare, server.undo):
        run()
    unit = "waker-wake.service"
    asked = [f"{verb} {unit}" for verb in ("enable", "restart", "disable --now")]
    lines = (server.folder / "asked").read_text().splitlines()
    assert [line for line in lines if unit in line] == asked


@pytest.mark.quick
def test_a_server_is_prepared_once_and_undone(server: Server) -> None:
    bare, image = server.files_of_the_owner(), server.image
    said = server.prepare(MARKED)
    host_key = f"{DROPBEAR}/dropbear_ed25519_host_key"
    shown = server.run(f"dropbearkey -y -f {host_key}")
    (public,) = re.findall(r"ssh-ed25519 \S+", shown)
    assert answers(said) == [
        "WAKER_HOMELAB_MAC=52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST=192.168.1.20",
        "WAKER_INITRD_SSH_PORT=2222",
        "WAKER_SYSTEM_SSH_PORT=22",
        f"WAKER_SSH_HOST_KEY={public}",
    ]
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    assert server.run(f"ls {image}*") == f"{image}\n{image}.before-waker\n"
    assert server.run(f"stat -c %a {image}.before-waker") == "600\n"  # it has keys
    table = server.run(f"unmkinitramfs {image} x; cat x/cryptroot/crypttab; rm -r x")
    assert table == TABLE.replace("discard", "discard,tries=0")
    assert server.read("/etc/crypttab") == TABLE
    assert server.count_builds() == 1

    prepared = server.files()
    said = server.prepare(MARKED)
    assert "Nothing was changed" in said
    assert "This will" not in said
    assert len(answers(said)) == 5
    assert (server.files(), server.count_builds()) == (prepared, 0)

    # If a run did not end, the next one does the rest, even if every file is right.
    server.run("systemctl disable waker-wake; touch /var/lib/waker-prepare/unfinished")
    assert "Nothing was changed" not in server.prepare()
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"

    said = server.undo()
    assert "\nUndone. The initrd of each kernel was examined.\n" in said
    assert server.files_of_the_owner() == bare
    assert server.run(f"ls {image}*") == f"{image}\n"
    inside = server.run(f"unmkinitramfs {image} x; cat x/root-x/.ssh/* x/conf/*/*; :")
    assert "ssh-ed25519" not in inside
    assert "IP=" not in inside
    assert server.undo() == "There is nothing to undo. Nothing was changed.\n"


def test_a_server_of_waker_3_is_taken_over_and_given_back(server: Server) -> None:
    """With its host key. Its settings had no mark, and its key no limit."""
    server.write(KEYS, f"{OWN_KEY}\n")
    server.write("/etc/initramfs-tools/conf.d/resume", "RESUME=none\n")  # as on any
    # Step 3 of its README.
    server.run(
        f"""cd {DROPBEAR}
        echo 'DROPBEAR_OPTIONS="-p 2222 -s -j -k -c cryptroot-unlock"' |
            tee -a dropbear.conf
        echo '{STATIC}' | tee /etc/initramfs-tools/conf.d/waker
        echo '{KEY}' | tee -a authorized_keys"""
    )
    old = {
        name: server.read(name) for name in (f"{DROPBEAR}/dropbear.conf", KEYS, CONF)
    }
    host_key = server.run(f"sha256sum {DROPBEAR}/*host_key")
    server.prepare()
    assert server.run(f"sha256sum {DROPBEAR}/*host_key") == host_key
    assert server.read(f"{DROPBEAR}/dropbear.conf") == old[f"{DROPBEAR}/dropbear.conf"]
    assert server.read(KEYS) == f"{OWN_KEY}\n{LIMITED}"
    assert "Nothing was changed" in server.prepare()
    assert server.read(CONF).splitlines()[2:] == [
        STATIC,
        "BOOTIF=01-52-54-00-12-34-56",
        '#export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    # Later, its address changes.
    server.set(links=probed()["links"].replace('"192.168.1.20"', '"192.168.1.30"'))
    server.cut_power(5)  # the record has the new file already
    assert server.read(CONF).splitlines()[2] == STATIC
    server.prepare()
    assert server.read(CONF).splitlines()[2] == STATIC.replace("1.20", "1.30")
    second = KEY.replace("AAA waker", "CCC waker")  # of another box
    server.prepare(f"--yes '{second}'")
    assert server.read(KEYS) == f"{OWN_KEY}\n{LIMITED}{LIMITED.replace(KEY, second)}"
    server.cut_power(6, "--yes --undo")
    assert server.read(CONF) == old[CONF]
    assert "Left:" not in server.undo()
    assert {name: server.read(name) for name in old} == old


@pytest.mark.quick
def test_a_server_of_waker_3_1_is_taken_over(server: Server) -> None:
    """A comment that has changed needs no new image. Its record is understood."""
    server.write(KEYS, f"{OWN_KEY}\n{KEY}\n")
    bare = server.files_of_the_owner()
    server.prepare()
    old_mark = "# Written by waker's prepare.py. `make server UNDO=1` removes it."
    rows = []
    for change in json.loads(server.read(RECORD)):
        kind, name, text, before = change.values()
        if kind == "FILE":
            text = text.replace(prepare.MARK, old_mark)
            server.path(name).write_text(text)
        if kind == "KEY":  # only the lines that it replaced
            before = KEY
        rows.append([kind, name, text, before or ""])
    server.write(RECORD, json.dumps(rows))
    server.run(f"sh ./mkinitramfs.sh {server.image}")
    server.count_builds()
    said = server.prepare()
    assert server.count_builds() == 0
    assert "The server is prepared." in said
    assert server.read(CONF).startswith(prepare.MARK)
    assert "Nothing was changed" in server.prepare()
    server.spoil("rm sbin/cryptsetup")  # so undo is run twice
    assert "FAILED" in server.undo(check=False)
    server.spoil("")
    assert "Left:" not in server.undo()
    assert server.files_of_the_owner() == bare


def test_a_failure_is_a_sentence(server: Server) -> None:
    before = server.files()
    assert "unrecognized arguments: --und" in server.prepare("--yes --und", check=False)
    assert server.files() == before
    server.run(f"mkdir -p {CONF}.waker-new")
    said = server.prepare(check=False)
    assert f"FAILED: [Errno 21] Is a directory: '{CONF}.waker-new'\nThe se" in said
    server.run(f"rmdir {CONF}.waker-new")
    server.prepare()


def test_it_waits_while_others_install_packages(server: Server) -> None:
    """As unattended upgrades do at night. Until then, nothing is changed."""
    hold = (
        "import fcntl, time; file = open('/var/lib/dpkg/lock-frontend', 'w');"
        "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); time.sleep(1000)"
    )
    holder = server.enter(f'exec /usr/bin/python3 -c "{hold}"')
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        before = server.files()
        program = server.enter(f"exec env {PROGRAM} --yes '{KEY}'")
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout
            line = waiting.stdout.readline()
            assert line == "Waiting for another program that installs packages.\n"
            assert server.files() == before
            process.kill()
            assert "The server is prepared." in waiting.stdout.read()


def test_it_waits_again_before_packages_change(server: Server) -> None:
    """An upgrade may begin while settings are written."""
    server.set(packages=probed()["packages"] + "dropbear-initramfs install installed\n")
    apt = APT.format(fails="update", folder=server.folder)
    server.write("/usr/bin/apt-get", apt, 0o755)
    server.run("cp $(which sync) sync")
    hold = (
        "import fcntl, os, time; file = open('/var/lib/dpkg/lock-frontend', 'w');"
        "fcntl.lockf(file, fcntl.LOCK_EX); open('held', 'w')\n"
        "while os.path.exists('held'): time.sleep(0.05)"
    )
    (server.folder / "hold").write_text(hold)
    script = f"""#!/bin/sh
cd {server.folder}
if [ ! -e once ]; then
    touch once
    /usr/bin/python3 hold >/dev/null 2>&1 &
    until [ -e held ]; do sleep 0.05; done
fi
exec ./sync "$@"
"""
    server.write("/usr/bin/sync", script, 0o755)
    for arguments in (f"--yes '{KEY}'", "--yes --undo"):
        (server.folder / "once").unlink(missing_ok=True)
        program = server.enter(f"exec env {PROGRAM} {arguments}")
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                if line == "Waiting for another program that installs packages.\n":
                    (server.folder / "held").unlink()
        assert process.returncode == 0
        assert not (server.folder / "held").exists()


# As apt-get of Debian 12 announces packages. It fails if its last argument is so.
APT = """#!/bin/sh
echo "$@" >>{folder}/asked
case $* in *" {fails}") echo "E: why" >&2; exit 100 ;; esac
echo "Inst libmnl0 [1.0.4-2] (1.0.4-3 Debian:12.12/oldstable [amd64])"
echo "Inst ethtool (1:6.1-1 Debian:12.12/oldstable [amd64])"
"""


@pytest.mark.quick
def test_packages_are_installed_before_an_image_is_built(server: Server) -> None:
    """What is only upgraded with them is not undone."""
    packages = f"{probed()['packages']}dropbear-initramfs install installed\n"
    server.set(packages=packages)
    server.count_builds()

    def let_fail(last: str) -> None:
        apt = APT.format(fails=last, folder=server.folder)
        server.write("/usr/bin/apt-get", apt, 0o755)

    for fails in ("--simulate", "ethtool"):
        let_fail(fails)
        said = server.prepare(MARKED, check=False)
        assert re.search("(?m)^FAILED: `apt-get .* ethtool.*` failed", said)
        assert "E: why" in said
        assert "waker-begin" not in said
    assert server.count_builds() == 0
    conf = server.path("/etc/etckeeper/etckeeper.conf")
    conf.parent.mkdir()
    for setting, hint in (("# ", False), ("", True)):  # it has aborted apt
        conf.write_text(f"{setting}AVOID_COMMIT_BEFORE_INSTALL=1\n")
        said = server.prepare(check=False)
        assert ("\nIf etckeeper refused it, first run `etckee" in said) == hint
    let_fail("update")
    (server.folder / "asked").unlink()
    packages = packages.replace("cryptsetup-initramfs install installed\n", "")
    server.set(packages=packages)
    said = server.prepare()  # it shows what apt says
    assert "\nE: why\n" in said
    assert "\nInst ethtool" in said
    record = json.loads(server.read(RECORD))
    assert [c["name"] for c in record if c["kind"] == "PACKAGE"] == ["ethtool"]
    update, *installs = (server.folder / "asked").read_text().splitlines()
    assert update.endswith("update")
    assert len(installs) == 4  # each of two packages is tried first
    for option in ("--no-remove", "Lock::Timeout=600", "Options::=--force-confold"):
        assert all(option in line for line in installs)


def test_it_needs_only_python() -> None:
    for path in CHECKOUT.glob("server/*.py"):
        imported = {*re.findall(r"(?m)^(?:import|from) (\w+)", path.read_text())}
        assert imported <= {*sys.stdlib_module_names, "facts"}

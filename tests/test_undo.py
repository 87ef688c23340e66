"""Interruptions of `prepare.py`, and its undo, on simulated servers."""

import json

import pytest
from conftest import need
from simulated import (
    CONF,
    DROPBEAR,
    KEY,
    KEYS,
    LIMITED,
    MARKED,
    OWN_KEY,
    RECORD,
    STATIC,
    Server,
    answers,
)


# Once before a file takes its place, and once after another did.
@pytest.mark.parametrize(("moment", "of_undo"), [(9, 4), (14, 5)])
def test_an_interruption_is_undone_or_finished(
    server: Server, moment: int, of_undo: int
) -> None:
    """The owner had put waker's key there before, without a limit."""
    server.write(KEYS, f"{KEY}\n", 0o600)
    bare, image = server.files_of_the_owner(), server.image

    def cut_power_and_boot() -> str:
        old = server.run(f"sha256sum <{image}")
        server.cut_power(moment)
        # It boots by its old image: that is in use, or in GRUB's menu.
        assert old in server.run(f"for file in {image}*; do sha256sum <$file; done")
        return old

    cut_power_and_boot()
    said = server.undo(check=False)
    assert "Undone" in said
    server.run("rm -rf /var/lib/waker-prepare")
    assert server.files_of_the_owner() == bare

    old = cut_power_and_boot()
    assert len(answers(server.prepare(MARKED))) == 5
    assert server.run(f"sha256sum <{image}.before-waker") == old
    assert "Nothing was changed" in server.prepare()

    server.cut_power(of_undo, "--yes --undo")
    assert "Nothing was changed" not in server.prepare()
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    server.cut_power(of_undo, "--yes --undo")
    said = server.undo()
    assert "Undone" in said
    assert "Left:" not in said
    assert server.files_of_the_owner() == bare
    assert server.run(f"ls {image}*") == f"{image}\n"


DAMAGED = (
    *("", "[{", "{}", "[1]", "[{}]", '[["FILE", "/x"]]', '[["X", "/x", "", ""]]'),
    *('[["KEY", "/x", "", ""]]', '[["FILE", "/x", 1, ""]]'),
)


def test_a_damaged_record_is_kept_and_named(server: Server) -> None:
    for text in DAMAGED:
        server.write(RECORD, text)
        before = server.files()
        for arguments in (f"--yes '{KEY}'", "--yes --undo"):
            said = server.prepare(arguments, check=False)
            words = f"Nothing was changed on this server: {RECORD} is damaged"
            assert words in said, text
        assert server.files() == before


@pytest.mark.parametrize(
    "keys",
    [
        # Comments, not active keys; a name that is no UTF-8; lines as on Windows.
        f"# me\f{OWN_KEY}\n# me\r{OWN_KEY}\n{OWN_KEY} \udcff\n{OWN_KEY}\r\n{KEY}\r\n",
        f"{KEY}\n{OWN_KEY}\n{LIMITED}{KEY} again",
        "",
    ],
    ids=["odd bytes", "twice", "empty"],
)
def test_own_keys_stay_to_the_byte(server: Server, keys: str) -> None:
    owners = keys.encode(errors="surrogateescape")
    server.write(KEYS, "", 0o640)
    server.path(KEYS).write_bytes(owners)
    server.prepare()
    lines = server.path(KEYS).read_bytes().split(b"\n")
    assert LIMITED.strip().encode() in lines
    assert all(KEY.encode() in line or line in lines for line in owners.split(b"\n"))
    server.spoil("rm sbin/cryptsetup")  # so undo is run twice
    assert "FAILED" in server.undo(check=False)
    server.spoil("")
    assert "Left:" not in server.undo()
    assert server.path(KEYS).read_bytes() == owners
    assert server.run(f"stat -c %a {KEYS}") == "640\n"


@pytest.mark.quick
def test_what_the_owner_has_changed_since_is_not_lost(server: Server) -> None:
    """In what was written, in GRUB's menu, or beside waker's key."""
    menu, own_entry = "/boot/grub/custom.cfg", "menuentry 'mine' {\n}\n"
    assert "WARNING: the kept" not in server.prepare()
    server.write(menu, own_entry + server.read(menu))
    server.write(KEYS, f"{server.read(KEYS)}{OWN_KEY}\n")
    changed = f"{server.read(CONF)}MODULES=dep\n"
    server.write(CONF, changed)
    before = server.files()
    said = server.prepare(check=False)
    assert f"Nothing was changed on this server: {CONF} has your changes" in said
    assert server.files() == before

    # Even if a run was interrupted.
    other = "/etc/kernel/postrm.d/waker"
    ours = server.read(other)
    server.write(other, "mine")
    server.run(f"rm {CONF}; touch /var/lib/waker-prepare/unfinished")
    said = server.prepare(check=False)
    assert f"Nothing was changed on this server: {other} has your changes" in said
    assert "\nThe server is half prepared. " in said
    server.write(other, ours, 0o755)
    assert "WARNING: the kept image gets no entry" in server.prepare()
    assert server.read(menu).startswith(own_entry)

    server.write(CONF, changed)
    server.write(KEYS, f'from="192.168.1.2",{server.read(KEYS)}')
    said = server.undo()
    assert f"Left: {CONF}, which you have changed." in said
    assert f"Left: waker's key in {KEYS}, because you have changed" in said
    assert server.read(CONF) == changed
    assert server.read(KEYS) == f'from="192.168.1.2",{LIMITED}{OWN_KEY}\n'
    assert server.read(menu).startswith(own_entry)


def package(name: str) -> dict[str, str | None]:
    """Return an entry of the record."""
    return {"kind": "PACKAGE", "name": name, "text": "", "before": None}


@pytest.mark.quick
def test_undo_removes_packages_but_not_what_opens_the_disk(server: Server) -> None:
    """Nor what lets its owner do that with another key."""
    need("tcsh")
    need("cryptsetup")
    server.write(KEYS, f"{OWN_KEY}\n")
    server.write(CONF, f"{STATIC}\n")  # waker 3.0's
    server.prepare()
    server.run(f"rm {CONF}")
    rows = json.loads(server.read(RECORD))
    needed = "cryptsetup-bin", "dropbear-bin"
    rows += map(package, ("tcsh", *needed))
    server.write(RECORD, json.dumps(rows))
    for name in ("dropbear_rsa_host_key.pub", "own_host_key", "own_host_key.pub"):
        server.write(f"{DROPBEAR}/{name}", "x")
    server.write("/etc/initrd-ssh/host_key.pub", "x")  # of dracut's module
    interrupted = "/^Package: ethtool$/,/^Version/s/ok installed/ok unpacked/"
    server.run(f"sed -i '{interrupted}' /var/lib/dpkg/status")
    known = (server.folder / "probed/packages").read_text()
    server.set(packages=f"{known}linux-image-6.9 install unpacked\n")
    assert "linux-image-6.9 is half installed" in server.undo(check=False)
    server.set(packages=known)
    said = server.undo()
    assert "Left: /etc/initrd-ssh/host_key.pub." in said
    for name in needed:
        assert f"Left: the package {name}." in said
    assert "tcsh" not in said.partition("Undone.")[2]
    assert f"Left: {CONF}" not in said  # it is not there any more
    assert server.run(f"cd {DROPBEAR}; ls *.pub") == "own_host_key.pub\n"
    status = "dpkg-query -Wf '${Package} ${db:Status-Status}, ' cryptsetup-bin ethtool"
    assert server.run(status) == "cryptsetup-bin installed, ethtool installed, "
    assert server.run("command -v tcsh", check=False) == ""


def test_undo_leaves_no_dropbear_that_came_with_it(server: Server) -> None:
    """If nobody else has a key there. So the key goes first."""
    server.prepare()
    rows = json.loads(server.read(RECORD))
    rows.append(package("dropbear-bin"))
    server.write(RECORD, json.dumps(rows))
    assert "dropbear" not in server.undo().partition("Undone.")[2]
    assert server.run("command -v dropbear", check=False) == ""

"""A simulated box: this computer, with folders, processes and stand-ins of its own.

It has this computer's programs, and its Python with the tests' paramiko. Scripts stand
in for systemd and procd. They do start and stop processes.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from conftest import need
from stand_ins import stub

PYTHON = "/usr/bin/python3"
PACKAGES = "/usr/lib/python3/dist-packages"
PARAMIKO = "paramiko* cryptography* bcrypt* nacl _cffi_backend*"
# Layers over /usr and /var, so that nothing is written to this computer's. /etc has few
# of this computer's files: its settings stay out. /run/systemd/system says that systemd
# is running. The last line reaps what has ended.
LAYERS = """
for folder in etc layers; do mkdir $folder; mount -t tmpfs none $folder; done
for name in alternatives group ld.so.cache os-release passwd ssl; do
    cp -a /etc/$name etc
done
for place in etc usr var; do
    lower=/$place layer=layers/$place
    [ $place != etc ] || lower=etc
    mkdir -p $layer/upper $layer/work
    layers=lowerdir=$lower,upperdir=$layer/upper,workdir=$layer/work
    mount -t overlay none /$place -o $layers
done
for folder in /boot /run /usr/local; do mount -t tmpfs none $folder; done
mkdir -p /boot/firmware /etc/systemd/system /run/systemd/system /usr/local/bin
cd {packages}
rm -rf {paramiko}
echo ready
while sleep 1; do :; done
"""
# How systemd's and procd's stand-ins run a service.
PROCESSES = """
exec 2>/dev/null
runs() { read -r pid </run/$name.pid && grep -q 'State:.[^ZX]' /proc/$pid/status; }
launch() {
    setsid "$@" </dev/null >>/run/$name.log 2>&1 &
    echo $! >/run/$name.pid
    echo "0::/system.slice/$name.service" >/run/$name.cgroup
    mount --bind /run/$name.cgroup /proc/$!/cgroup
}
stop() {
    runs || return 0
    kill $pid
    while runs; do sleep 0.05; done
}
"""
# What needs no systemd that is running is left to its own program. `show` prints what
# systemd 252 would. Drop-ins are read from /etc alone.
SYSTEMCTL = f"""
name=${{2%.service}}
{PROCESSES}
show_unit() {{
    file=$name
    case $name in *@*) file=${{name%%@*}}@ ;; esac
    for folder in /etc /usr/local/lib /usr/lib; do
        unit=$folder/systemd/system/$file.service
        [ ! -e $unit ] || break
    done
    cat $unit /etc/systemd/system/$file.service.d/*.conf
}}
read_unit() {{
    credentials=/run/credentials/$name.service
    show_unit | sed -n "s|%d|$credentials|g; s|%i|${{name#*@}}|g; s|^$1=||p"
}}
case $1 in
enable | disable | is-enabled | list-unit-files | mask | unmask)
    SYSTEMD_OFFLINE=1 exec /usr/bin/systemctl "$@"
    ;;
is-active)
    [ ! -e /run/$name.crashed ] || echo activating
    runs && echo active
    ;;
show)
    loaded=
    case "$* " in *" *.service "*) loaded=/run/*.pid ;; esac
    cd /etc/systemd/system
    for unit in *.service /usr/local/lib/systemd/system/*.service $loaded; do
        name=${{unit##*/}}
        name=${{name%.*}} state=inactive
        case $name in *@ | '*') continue ;; esac
        ! runs || state=active
        [ ! -e /run/$name.crashed ] || state=activating
        start=$(read_unit ExecStart | tail -n 1)
        echo "Id=$name.service"
        echo "ActiveState=$state"
        echo "ExecStart={{ path=${{start%% *}} ; argv[]=$start ; pid=0 }}"
        echo "Environment="$(read_unit Environment)
        read_unit EnvironmentFile |
            sed 's/^-*/EnvironmentFiles=/; s/$/ (ignore_errors=no)/'
        echo
    done
    ;;
cat) show_unit ;;
stop) stop ;;
restart)
    stop
    rm -f /run/$name.crashed
    variables=$(read_unit Environment)
    for file in $(read_unit EnvironmentFile); do
        variables="$variables $(cat ${{file#-}})"
    done
    mkdir -p /run/credentials/$name.service
    for credential in $(read_unit LoadCredential); do
        cp ${{credential#*:}} /run/credentials/$name.service/${{credential%%:*}}
    done
    eval "launch env" $variables "$(read_unit ExecStart | tail -n 1)"
    ;;
esac
"""
JOURNALCTL = """
while [ $1 != -u ]; do shift; done
cat /run/$2.log
"""
# `enable` and `disable` are as in OpenWrt's rc.common.
RC_COMMON = f"""
script=$1 name=${{1##*/}} action=$2
{PROCESSES}
user_exists() {{ :; }}
id() {{ :; }}
chown() {{ :; }}
procd_open_instance() {{ :; }}
procd_close_instance() {{ :; }}
procd_set_param() {{
    [ $1 = command ] || return 0
    shift
    launch "$@"
}}
. $script
case $action in
enable) ln -sf ../init.d/$name /etc/rc.d/S$START$name ;;
disable) rm -f /etc/rc.d/S*$name ;;
stop) stop ;;
restart) stop; start_service ;;
running) runs ;;
esac
"""


class Box:
    """The box, by the process that holds its namespaces."""

    def __init__(self, folder: Path, holder: int) -> None:
        self.folder, self.holder = folder, holder
        self.stubs = folder / "stubs"
        self.program = folder / "waker"  # the one file, as somebody has copied it
        self.paramiko = f"{PACKAGES}/paramiko"
        # Shell commands that give the box the tests' paramiko.
        site = Path(paramiko.__file__).parents[1]
        self.link_paramiko = (
            f"cd {site}; for n in {PARAMIKO}; do ln -sfn $PWD/$n {PACKAGES}; done\n"
        )
        self.apt_get = f"case $* in *' install '*) {self.link_paramiko} ;; esac\n"

    def enter(self, *command: str) -> list[str]:
        """Return a command that runs another one there."""
        path = f"PATH={self.stubs}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        place = "--mount", "--pid", f"--target={self.holder}"
        return [need("nsenter"), *place, "env", "-C", str(self.folder), path, *command]

    def call(self, *command: str, given: str = "") -> tuple[int, str]:
        """Run a command there; returns its status and all that it printed."""
        ended = subprocess.run(
            self.enter(*command),
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout

    def run(self, script: str) -> str:
        """Run commands of the shell, which must succeed; returns what they printed."""
        status, shown = self.call("sh", "-ec", script)
        assert status == 0, shown
        return shown

    def waker(self, arguments: str, given: str = "") -> tuple[int, str]:
        """Run the copied file with a command such as `install --yes`."""
        command = PYTHON, str(self.program), *shlex.split(arguments)
        return self.call(*command, given=given)

    def install(self, arguments: str = "") -> str:
        """Install waker, which must succeed; returns what it shows."""
        status, shown = self.waker(f"install --yes {arguments}")
        assert status == 0, shown
        return shown

    def path(self, name: str) -> Path:
        """Return the path of a file there, for this process."""
        return Path(f"/proc/{self.holder}/root{name}")

    def write(self, name: str, text: str | bytes, mode: int = 0o600) -> None:
        file = self.path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)

    def installed(self) -> dict[str, tuple[int, bytes]]:
        """Return mode and content of each file whose path contains `waker`."""
        places = "/etc /lib/upgrade /usr/bin/waker /usr/local"
        names = self.run(f"find {places} ! -type d 2>/dev/null || :")
        found = {}
        for name in names.splitlines():
            file = self.path(name)
            if "waker" in name:
                is_link = file.is_symlink()
                data = os.fsencode(file.readlink()) if is_link else file.read_bytes()
                found[name] = (file.lstat().st_mode & 0o777, data)
        return found


def need_system_python() -> None:
    """Skip unless the tests run with the Python that runs waker on a box."""
    if Path(sys.executable).resolve() != Path(PYTHON).resolve():
        pytest.skip(f"need tests that run with {PYTHON}")


@contextlib.contextmanager
def new_box(folder: Path, program: Path) -> Iterator[Box]:
    """Make a box with systemd and paramiko, to which a program was copied."""
    for name in ("nsenter", "systemctl", "ssh", "sudo"):
        need(name)
    need_system_python()
    folder.joinpath("stubs").mkdir(parents=True)
    shutil.copy(program, folder)
    spaces = "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"
    script = LAYERS.format(packages=PACKAGES, paramiko=PARAMIKO)
    command = [need("unshare"), *spaces, "sh", "-ec", script]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == b"ready\n"
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
            box = Box(folder, int(children.read_text()))
            stub(box.stubs / "systemctl", SYSTEMCTL)
            stub(box.stubs / "journalctl", JOURNALCTL)
            for name in ("apt-get", "dpkg", "dpkg-query"):
                stub(box.stubs / name)
            box.run(box.link_paramiko)
            yield box
        finally:
            holder.kill()

"""Join the sources into one file, a zip application (PEP 441).

    python3 -IS box/pack.py [--compile] FROM TO

FROM is a checkout, or a program that was packed before. TO has waker.py, the page, what
sets up a box and a server, and nothing compiled: compiled code would run in place of
the source that somebody has read. The same sources make the same bytes.

--compile adds the code of this Python for each source that the box runs, so that it
starts at once. It is for the file that is installed, which the same Python makes again
to the byte. A packed program that has compiled code already is refused.
"""

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

SHEBANG = b"#!/usr/bin/python3\n"  # Debian's python3-paramiko is for this one
TOP = "waker.py", "ui.html", "waker.service", "waker.init", "waker.env.example"
FOLDERS = "box", "server"


def read_files(source: Path) -> dict[str, bytes]:
    """Return the contents of the files, by their names in the program.

    Raises: OSError, ValueError if the program is damaged.
    """
    if source.is_dir():
        # Python starts with the first one. In a checkout, it is `python3 -m box`.
        paths = {"__main__.py": source / "box/__main__.py"}
        paths |= {name: source / name for name in TOP}
        for folder in FOLDERS:
            for path in source.glob(f"{folder}/**/*"):
                if path.is_file() and path.suffix != ".pyc":
                    paths[path.relative_to(source).as_posix()] = path
        return {name: path.read_bytes() for name, path in paths.items()}
    try:
        with zipfile.ZipFile(source) as archive:
            # Reading compares checksums.
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ValueError(error) from None


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a file is none of the sources."""
    for name in names:
        folder, *others = name.split("/")
        if name.endswith(".pyc"):
            raise ValueError(f"{name} would run in place of its source")
        if name not in ("__main__.py", *TOP) and folder not in FOLDERS:
            raise ValueError(f"{name} is none of waker's files")
        if not {"", ".", ".."}.isdisjoint(others):
            raise ValueError(f"{name} is no file's name")


def compile_sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the code of what the box runs. Raises: ValueError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, data in files.items():
            if source.endswith(".py") and not source.startswith("server/"):
                file = folder / source
                try:
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(data)
                except OSError as error:  # whose own text may name no file
                    raise ValueError(f"{file}: {error.strerror}") from None
        # In a process of its own, because the bytes depend on what else it has loaded.
        # Without time stamps, which Python would compare in local time: in any other
        # time zone, it would use the sources.
        compiler = [sys.executable, "-IS", "-m", "compileall", "-q", "-b"]
        options = ["--invalidation-mode=unchecked-hash", "-s", name, name]
        if subprocess.run([*compiler, *options], check=False).returncode:
            raise ValueError(f"one of its sources cannot be compiled in {name}")
        codes = sorted(folder.rglob("*.pyc"))
        return {str(code.relative_to(folder)): code.read_bytes() for code in codes}


def build(files: Mapping[str, bytes]) -> bytes:
    """Return the program with these files."""
    packed = io.BytesIO(SHEBANG)
    # Not compressed, which takes time, and differs from zlib to zlib.
    with zipfile.ZipFile(packed, "a") as archive:
        for name, data in sorted(files.items()):
            member = zipfile.ZipInfo(name)  # dated 1980
            member.external_attr = 0o644 << 16  # or unzip lets nobody read it
            archive.writestr(member, data)
    return packed.getvalue()


def pack(source: Path, target: Path, *, with_code: bool) -> None:
    """Write the program; `target` stays as it is until that is complete."""
    files = read_files(source)
    check_names(files)
    if with_code:
        files |= compile_sources(files)
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_bytes(build(files))
        part.chmod(0o755)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="add compiled code")
    parser.add_argument("FROM", type=Path, help="a checkout, or a program")
    parser.add_argument("TO", type=Path, help="the program to write")
    given = parser.parse_args()
    try:
        pack(given.FROM, given.TO, with_code=given.compile)
    except (OSError, ValueError) as error:
        sys.exit(f"{given.FROM} cannot be packed: {error}")


if __name__ == "__main__":
    main()

"""Join waker.py and ui.html into one program, a zip application (PEP 441).

    python3 -IS box/pack.py [--source] FROM TO

FROM is a folder with both, or a program that was packed before. TO contains both, and
waker.py compiled by this Python, so that it starts at once. Other Pythons use the
source. --source leaves the compiled code out. The same files and the same Python make
the same bytes, which you can compare with `cmp`.
"""

import argparse
import py_compile
import sys
import tempfile
import zipfile
from pathlib import Path

SHEBANG = b"#!/usr/bin/python3\n"  # Debian's python3-paramiko is for this one
MAIN = b"import sys\n\nimport waker\n\nsys.exit(waker.main(sys.argv))\n"


def read_files(source: Path) -> dict[str, bytes]:
    """Read both files. Raises: OSError, KeyError."""
    names = "waker.py", "ui.html"
    if source.is_dir():
        return {name: source.joinpath(name).read_bytes() for name in names}
    with zipfile.ZipFile(source) as archive:
        return {name: archive.read(name) for name in names}


def compile_code(source: bytes) -> bytes:
    """Compile waker.py. Raises: PyCompileError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "waker.py")
        file.write_bytes(source)
        # Without a time stamp, which Python would compare in local time: in any other
        # time zone, it would use the source.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compiled = f"{file}c"
        py_compile.compile(
            str(file), compiled, file.name, doraise=True, invalidation_mode=mode
        )
        return Path(compiled).read_bytes()


def pack(source: Path, target: Path, *, with_code: bool) -> None:
    """Write the program; `target` stays as it is until that is complete."""
    files = read_files(source) | {"__main__.py": MAIN}
    if with_code:
        files["waker.pyc"] = compile_code(files["waker.py"])
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as file:
        file.write(SHEBANG)
        # Not compressed, which takes time, and differs from zlib to zlib.
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in files.items():
                archive.writestr(zipfile.ZipInfo(name), data)  # dated 1980
    part.chmod(0o755)
    part.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", action="store_true", help="leave the code out")
    parser.add_argument("FROM", type=Path, help="a folder, or a program")
    parser.add_argument("TO", type=Path, help="the program to write")
    given = parser.parse_args()
    try:
        pack(given.FROM, given.TO, with_code=not given.source)
    except (OSError, KeyError, zipfile.BadZipFile, py_compile.PyCompileError) as error:
        sys.exit(f"{given.FROM} cannot be packed: {error}")


if __name__ == "__main__":
    main()

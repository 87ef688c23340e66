"""Read the sources in the one file, and replace files safely."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import waker
from box import Refused, pack


@functools.cache
def read_sources() -> Mapping[str, bytes]:
    """Return every file of the one file, or of the checkout. Raises: Refused."""
    try:
        return pack.read_files(waker.HERE)
    except (OSError, ValueError) as error:
        raise Refused(f"{waker.HERE} is damaged: {error}. Copy it again.") from None


def new_name(file: Path) -> Path:
    """Return the temporary name of what will replace a file."""
    return file.with_name(f".{file.name}.new")


def write_new(
    file: Path, data: bytes, mode: int, owner: tuple[int, int] = (-1, -1)
) -> Path:
    """Write, beside a file, what will replace it; returns the new file's path.

    It has been synced: once renamed, a power cut leaves the old file or the new one.
    The owner's user and group are IDs; -1 is this process's. Raises: OSError.
    """
    new = new_name(file)
    new.unlink(missing_ok=True)  # of a run that was killed
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as writer:
        writer.write(data)
        writer.flush()
        os.fchown(descriptor, *owner)
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    return new

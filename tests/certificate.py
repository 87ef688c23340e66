"""A certificate that nobody signed but itself, for tests of HTTPS."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from conftest import need


class Certificate(NamedTuple):
    """A certificate's two files."""

    cert: Path
    key: Path

    def settings(self) -> dict[str, str]:
        return {"WAKER_TLS_CERT": str(self.cert), "WAKER_TLS_KEY": str(self.key)}


def new_certificate(folder: Path, passphrase: bytes = b"") -> Certificate:
    """Make one for 127.0.0.1, valid for a day."""
    files = Certificate(folder / "cert.pem", folder / "key.pem")
    command = [need("openssl"), "req", "-x509", "-days", "1", "-subj", "/CN=waker"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    # OpenSSL requires at least four characters.
    locked = ["-passout", f"pass:{passphrase.decode():>4}"]
    command += locked if passphrase else ["-nodes"]
    command += ["-out", str(files.cert), "-keyout", str(files.key)]
    subprocess.run(command, check=True, capture_output=True)
    for file in files:
        file.chmod(0o600)
    return files

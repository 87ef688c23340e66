"""A certificate that nobody signed but itself, for tests of HTTPS."""

import datetime as dt
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Certificate(NamedTuple):
    """Its two files."""

    cert: Path
    key: Path

    def settings(self) -> dict[str, str]:
        return {"WAKER_TLS_CERT": str(self.cert), "WAKER_TLS_KEY": str(self.key)}


def new_certificate(folder: Path, passphrase: bytes = b"") -> Certificate:
    """Make one for 127.0.0.1, valid for a day."""
    files = Certificate(folder / "cert.pem", folder / "key.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "waker")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    for file in files:
        file.touch(mode=0o600)
    files.cert.write_bytes(cert.public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(
            pem,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption(),
        )
    )
    return files

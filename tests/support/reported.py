"""What prepare.py reports of a server, and how its answer begins and ends."""

import base64

MAC, HOST = "52:54:00:12:34:56", "127.0.0.77"
BLOB = b"\0\0\0\x0bssh-ed25519\0\0\0 "
HOST_KEY = "ssh-ed25519 " + base64.b64encode(BLOB + bytes(32)).decode()
OTHER_KEY = "ssh-ed25519 " + base64.b64encode(BLOB + bytes(range(32))).decode()
REPORTED = {
    "WAKER_HOMELAB_MAC": MAC,
    "WAKER_HOMELAB_HOST": HOST,
    "WAKER_INITRD_SSH_PORT": "2222",
    "WAKER_SYSTEM_SSH_PORT": "2022",
    "WAKER_SSH_HOST_KEY": HOST_KEY,
}
LINES = "".join(f"{name}={value}\n" for name, value in REPORTED.items())
ANSWER = f"waker-begin NONCE\n{LINES}waker-end NONCE\n"

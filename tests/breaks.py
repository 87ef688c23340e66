"""Break each promise on purpose and see that a test notices: `make breaks`.

A row names a section of the design, the promise, the text to replace in a copy of the
program, and the tests that must fail then. They must pass on the program as it is, and
fail while they run; an error while they are set up or collected does not count.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

CHECKOUT = Path(__file__).resolve().parent.parent


class Break(NamedTuple):
    """A promise, how to break it, and who must notice."""

    section: int  # of the design
    promise: str
    old: str
    new: str
    tests: str  # arguments of pytest, below tests/
    file: str = "waker.py"


HOSTILE = "test_hostile.py -k "
UNLOCK = "test_unlock.py -k "
START = "test_start.py -k "
HTTP = "test_http.py -k "
API = "test_api.py -k "
CONFIG = "test_config.py -k "
DAEMON = "test_daemon.py -k "
WATCH = "test_watch.py -k "
CHECK = "test_check.py -k "
FIGURES = "test_figures.py"
PAGE = "test_page.py -k "

BREAKS = (
    # ---- 2. Promises -----------------------------------------------------------------
    Break(
        2,
        "the passphrase goes only to a machine with a pinned host key",
        "    if seen not in machine.host_keys:\n",
        "    if seen.kind == 'none':\n",
        UNLOCK + "not_right",
    ),
    Break(
        2,
        "the passphrase goes only to an initrd that asked",
        "        if event is not Outcome.ASKS:\n            raise NotSent",
        "        if event is Outcome.REFUSED:\n            raise NotSent",
        UNLOCK + "claims_nothing",
    ),
    Break(
        2,
        "an end without a verdict is no success",
        "return endings.get(self._channel.exit_status, Outcome.ENDED), []",
        "return endings.get(self._channel.exit_status, Outcome.UNLOCKED), []",
        UNLOCK + "claims_nothing",
    ),
    Break(
        2,
        "cryptroot-unlock that ends without asking means that all disks are open",
        "        silence=Outcome.ALL_OPEN,\n",
        "",
        UNLOCK + "each_disk",
    ),
    Break(
        2,
        "the passphrase is in no core dump",
        "resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
        "pass",
        DAEMON + "leaves_nothing",
    ),
    Break(
        2,
        "the passphrase is never lost on the way to that process",
        "stdin.write(passphrase.data)  # fits into the pipe: cannot block",
        "stdin.write(passphrase.data[:-1])",
        DAEMON + "stalls",
    ),
    Break(
        2,
        "a disk is never answered twice",
        "            if self._answered & set(asking):  # never answer a disk twice\n",
        "            if self._answered > set(asking) | {''}:\n",
        UNLOCK + "asks_again",
    ),
    Break(
        2,
        "the status answers within one second",
        "PROBE_SECONDS: Final = 0.8",
        "PROBE_SECONDS: Final = 1.8",
        WATCH + "within_a_second",
    ),
    Break(
        2,
        "the magic packet leaves by the interface that leads to the machine",
        "            udp.bind((source, 0))\n",
        "",
        "test_wake.py",
    ),
    Break(
        2,
        "every malformed request gets a JSON error",
        'return Response({"error": str(fault)}, fault.status, fault.headers)',
        "return Response(str(fault).encode(), fault.status, fault.headers)",
        HTTP + "bad_request",
    ),
    # ---- 4. Configuration ------------------------------------------------------------
    Break(
        4,
        "a PIN has at least 8 characters",
        "if not 8 <= len(text) <= 128",
        "if not 7 <= len(text) <= 128",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "a PIN has at most 128 characters",
        "if not 8 <= len(text) <= 128",
        "if not 8 <= len(text) <= 129",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "a PIN of 128 characters is accepted",
        "if not 8 <= len(text) <= 128",
        "if not 8 <= len(text) <= 127",
        CONFIG + "up_to_128",
    ),
    Break(
        4,
        "a PIN has no space at either end",
        " or text != text.strip():",
        ":",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "the PIN that a client sends is stripped",
        'pin = text_member(request, "pin").strip()',
        'pin = text_member(request, "pin")',
        API + "ten_attempts",
    ),
    Break(
        4,
        "a MAC address is not of a group",
        "octets[0] & 1 or ",
        "",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "a MAC address is not all zeros",
        " or not any(octets):",
        ":",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "the environment wins over the file",
        "values = (read_env_file(file) if file else {}) | ours",
        "values = ours | (read_env_file(file) if file else {})",
        CONFIG + "environment_wins",
    ),
    Break(
        4,
        "without settings, the usual file is read",
        "arguments.env_file or (None if ours else Path(ENV_FILE))",
        "arguments.env_file",
        CONFIG + "usual_file",
    ),
    Break(
        4,
        "a relative path starts at FILE's folder",
        "parsed[name] = folder / value if isinstance(value, Path) else value",
        "parsed[name] = value",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "all mistakes are reported together",
        "    mistakes += find_conflicts(parsed)\n",
        "    mistakes = mistakes[:1] + [*find_conflicts(parsed)]\n",
        CONFIG + "environment_wins",
    ),
    Break(
        4,
        "a mistake ends with status 78",
        "return os.EX_CONFIG",
        "return 1",
        CONFIG + "environment_wins",
    ),
    Break(
        4,
        "an unknown WAKER_ name is a mistake",
        "values.keys() - {setting[0] for setting in SETTINGS}",
        "set()",
        CONFIG + "wrong_value",
    ),
    Break(
        4,
        "a comment behind a value is a mistake",
        r"""(['\"]).*\1\s+#|[^'\"].*\s#""",
        r"""(['\"]).*\1\s+#""",
        CONFIG + "misread",
    ),
    Break(
        4,
        "a name that is set twice is a mistake",
        "            if name in values:\n",
        "            if name in mistakes:\n",
        CONFIG + "misread",
    ),
    Break(
        4,
        "`unlock` and `state` need no PIN",
        "Machine(*parse_settings(len(Machine._fields), values, folder))",
        "read_config(values, folder).machine",
        DAEMON + "only_what_they_need",
    ),
    Break(
        4,
        "with `systemd`, both ports must differ",
        'if one_port and get("WAKER_INITRD") == parse_dialect("systemd"):',
        'if one_port and get("WAKER_INITRD") == "systemd":',
        CONFIG + "fit_each_other",
    ),
    Break(
        4,
        "an IPv6 machine needs a broadcast address",
        '    if broadcast == "255.255.255.255" and ":" in str(host):\n',
        '    if broadcast == "255.255.255.255" and "::::" in str(host):\n',
        CONFIG + "fit_each_other",
    ),
    Break(
        4,
        "a certificate needs its key",
        "if len(tls) == 2 and bool(tls[0]) != bool(tls[1]):",
        "if len(tls) == 3:",
        CONFIG + "fit_each_other",
    ),
    Break(
        4,
        "a key that is open to others is a mistake",
        "        if self.private and mode & 0o007:\n",
        "        if self.private and mode & 0o004:\n",
        CONFIG + "private_key",
    ),
    Break(
        4,
        "one trailing newline of the passphrase is removed",
        'given.decode().removesuffix("\\n")',
        "given.decode()",
        DAEMON + "utf8",
    ),
    Break(
        4,
        "`check` notes a port below 1024",
        "    if 0 < port < 1024:\n",
        "    if 0 < port < 1023:\n",
        CHECK + "1024",
    ),
    Break(
        4,
        "`check` accepts port 1024",
        "    if 0 < port < 1024:\n",
        "    if 0 < port <= 1024:\n",
        CHECK + "1024",
    ),
    Break(
        4,
        "`check` notes a PIN of digits",
        "    if config.pin.is_number:\n",
        "    if not config.pin:\n",
        CHECK + "each_thing",
    ),
    Break(
        4,
        "`check` ends with 1 if anything is wrong",
        "            status = 1\n",
        "            status = 0\n",
        CHECK + "one_thing",
    ),
    # ---- 5. API ----------------------------------------------------------------------
    Break(
        5,
        "an unknown path is 404, whatever the token",
        '    if not rows:\n        raise Fault(404, "No such path")\n',
        '    if not rows:\n        raise Fault(401, "No such path")\n',
        API + "another_path",
    ),
    Break(
        5,
        "405 comes with Allow",
        'raise Fault(405, f"Allowed here: {allowed}", ("Allow", allowed))',
        'raise Fault(405, f"Allowed here: {allowed}")',
        API + "another_path",
    ),
    Break(
        5,
        "what has no token is refused",
        "    if not open_to_all and not app.gate",
        "    if not rows and not app.gate",
        API + "without_a_token",
    ),
    Break(
        5,
        "a token is checked before the body",
        "    handler, open_to_all = rows[request.method]\n",
        "    handler, open_to_all = rows[request.method]\n"
        "    if request.body is None:\n"
        "        raise Fault(413, 'The body is too long')\n",
        API + "without_a_token",
    ),
    Break(
        5,
        "a body that is no JSON is refused by its type",
        '        raise Fault(415, "Content-Type must be application/json")\n',
        "        pass\n",
        API + "has_no_pin",
    ),
    Break(
        5,
        "the 11th attempt in 60 s is refused",
        "MAX_ATTEMPTS: Final = 10",
        "MAX_ATTEMPTS: Final = 11",
        API + "ten_attempts",
    ),
    Break(
        5,
        "an attempt counts for 60 s",
        "ATTEMPT_SECONDS: Final = 60",
        "ATTEMPT_SECONDS: Final = 50",
        API + "for_a_minute",
    ),
    Break(
        5,
        "right and wrong PINs count alike",
        "    app.gate.count_attempt(request.client, request.now)\n"
        "    if not app.config.pin.matches(pin):\n",
        "    if not app.config.pin.matches(pin):\n"
        "        app.gate.count_attempt(request.client, request.now)\n",
        API + "ten_attempts",
    ),
    Break(
        5,
        "429 says when to try again",
        'raise Fault(429, text, ("Retry-After", wait))',
        "raise Fault(429, text)",
        API + "ten_attempts",
    ),
    Break(
        5,
        "attempts are counted per IPv6 /56",
        '>> 72:x}::/56"',
        '>> 64:x}::/64"',
        API + "by_its_56",
    ),
    Break(
        5,
        "IPv4-mapped counts as IPv4",
        'return tcp, (address[0].removeprefix("::ffff:"), address[1])',
        "return tcp, address[:2]",
        DAEMON + "log_names",
    ),
    Break(
        5,
        "at most 4,096 clients are remembered",
        "MAX_CLIENTS: Final = 4096",
        "MAX_CLIENTS: Final = 40960",
        API + "no_memory or 3_mb",
    ),
    Break(
        5,
        "the client that was seen longest ago is forgotten first",
        "del self._attempts[next(iter(self._attempts))]",
        "del self._attempts[next(reversed(self._attempts))]",
        API + "no_memory",
    ),
    Break(
        5,
        "a token has 32 random bytes",
        "secrets.token_urlsafe(32)",
        "secrets.token_urlsafe(16)",
        API + "ten_attempts",
    ),
    Break(
        5,
        "a token lives 15 minutes",
        "TOKEN_SECONDS: Final = 900",
        "TOKEN_SECONDS: Final = 901",
        API + "15_minutes",
    ),
    Break(
        5,
        "64 tokens live at a time",
        "MAX_TOKENS: Final = 64",
        "MAX_TOKENS: Final = 65",
        API + "15_minutes",
    ),
    Break(
        5,
        "the oldest token ends first",
        "del self._expiry[next(iter(self._expiry))]",
        "del self._expiry[next(reversed(self._expiry))]",
        API + "15_minutes",
    ),
    Break(
        5,
        "a magic packet has 102 bytes",
        'return b"\\xff" * 6 + mac * 16',
        'return b"\\xff" * 6 + mac * 15',
        "test_wake.py",
    ),
    Break(
        5,
        "the packet is sent three times",
        "            for _ in range(3):  # UDP",
        "            for _ in range(2):  # UDP",
        START + "woken_once",
    ),
    Break(
        5,
        "the packet goes to UDP port 9",
        "packet_port: int = 9",
        "packet_port: int = 7",
        "test_wake.py",
    ),
    Break(
        5,
        "a wrong passphrase is 400",
        "        raise Fault(400, result.message)\n",
        "        raise Fault(500, result.message)\n",
        API + "journey",
    ),
    Break(
        5,
        "what is not confirmed does not say that it failed",
        'raise Fault(500, f"{result.message[:-1]}; watch GET /api/status")',
        'raise Fault(500, f"Failed to unlock: {result.message[:-1]}")',
        HOSTILE + "advance",
    ),
    Break(
        5,
        "an unlock while another one runs is 409",
        'raise Fault(409, "Another unlock or start is running; wait for it to end")',
        'raise Fault(500, "Another unlock or start is running; wait for it to end")',
        START + "lets_the_rest_finish",
    ),
    Break(
        5,
        "a passphrase has at most 512 bytes",
        "if not 1 <= len(self.data) <= 512",
        "if not 1 <= len(self.data) <= 513",
        API + "impossible",
    ),
    Break(
        5,
        "a passphrase has no control characters",
        r' or re.search(r"[\x00-\x1f\x7f-\x9f]", text):',
        ":",
        API + "impossible",
    ),
    Break(
        5,
        "a failed start is forgotten once the machine is up",
        "            if (is_over and not stays) or start.ended",
        "            if start.ended",
        START + "forgotten",
    ),
    Break(
        5,
        "the host key alarm stays",
        'stays = start.phase is Phase.DONE or start.outcome == "host_key_differs"',
        "stays = start.phase is Phase.DONE",
        START + "forgotten",
    ),
    Break(
        5,
        "a start is forgotten after an hour",
        "SHOWN_SECONDS: Final = 3600",
        "SHOWN_SECONDS: Final = 1800",
        START + "for_an_hour",
    ),
    Break(
        5,
        "`sent` says whether the passphrase may have been sent",
        '"sent": start.sent.is_set(),',
        '"sent": False,',
        START + "forgotten",
    ),
    Break(
        5,
        "HEAD works where GET does",
        '        rows["HEAD"] = rows["GET"]\n',
        "        pass\n",
        API + "head_is_get",
    ),
    # ---- 6. Watching -----------------------------------------------------------------
    Break(
        6,
        "a check is shared for one second",
        "            if now >= self._checked + 1:",
        "            if now >= self._checked + 0.5:",
        WATCH + "twice_a_second",
    ),
    Break(
        6,
        "one check runs at a time",
        "        with self._lock:\n            if now >= self._checked",
        "        with contextlib.nullcontext():\n            if now >= self._checked",
        WATCH + "share_one",
    ),
    Break(
        6,
        "a refused connection proves that the machine is reachable",
        "    except (ConnectionRefusedError, ConnectionResetError):\n"
        "        return PortState.CLOSED",
        "    except (ConnectionRefusedError, ConnectionResetError):\n"
        "        return PortState.SILENT",
        WATCH + "shared_port",
    ),
    Break(
        6,
        "a connection counts only if it has a peer",
        "        tcp.getpeername()  #",
        "        #",
        WATCH + "no_error_is_found",
    ),
    Break(
        6,
        "on a shared port, dropbear is the initrd",
        '        if "dropbear" in banner:\n',
        '        if "OpenSSH" in banner:\n',
        WATCH + "shared_port",
    ),
    Break(
        6,
        "a failure of our own is `unknown`",
        '        if PortState.UNKNOWN in self:\n            state = "unknown"\n',
        "",
        WATCH + "two_ports",
    ),
    Break(
        6,
        "an open system port is `up`",
        '            state = "up"\n',
        '            state = "locked"\n',
        WATCH + "two_ports",
    ),
    # ---- 7. Unlocking ----------------------------------------------------------------
    Break(
        7,
        "an unlock has 90 seconds",
        "unlock_seconds: int = 90",
        "unlock_seconds: int = 60",
        FIGURES,
    ),
    Break(
        7,
        "a cancelled unlock writes no passphrase",
        "                if not cancelled.is_set():\n                    stdin",
        "                if not sent.is_set():\n                    stdin",
        DAEMON + "given_no_passphrase",
    ),
    Break(
        7,
        "a process that cannot start has sent nothing",
        'reason = f"the unlocking process cannot start: {error.strerror}"\n'
        "            return Result.of(Outcome.ERROR, reason, sent=False)",
        'reason = f"the unlocking process cannot start: {error.strerror}"\n'
        "            return Result.of(Outcome.ERROR, reason, sent=True)",
        DAEMON + "cannot_start",
    ),
    Break(
        7,
        "nothing weak is offered: digests",
        '[name for name in options.digests if "sha2" in name]',
        "[*options.digests]",
        UNLOCK + "weak",
    ),
    Break(
        7,
        "nothing weak is offered: ciphers",
        '[name for name in options.ciphers if re.search("ctr|gcm", name)]',
        "[*options.ciphers]",
        UNLOCK + "weak",
    ),
    Break(
        7,
        "the pinned key type is preferred",
        "sorted(strong, key=lambda name: not name.startswith(pinned))",
        "strong",
        UNLOCK + "pinned_type",
    ),
    Break(
        7,
        "our key is the only way to log in",
        "    if not transport.is_authenticated():\n",
        "    if not key:\n",
        UNLOCK + "not_right",
    ),
    Break(
        7,
        "a connection that is lost is noticed in 10 s",
        "LOST_SECONDS: Final = 10",
        "LOST_SECONDS: Final = 1000",
        FIGURES,
    ),
    Break(
        7,
        "a handshake has 10 s",
        "HANDSHAKE_SECONDS: Final = 10",
        "HANDSHAKE_SECONDS: Final = 1",
        FIGURES,
    ),
    Break(
        7,
        "the child's environment has no WAKER_ names but the machine's",
        'others = {n: v for n, v in env.items() if not n.startswith("WAKER_")}',
        "others = dict(env)",
        DAEMON + "shows_no_secret",
    ),
    Break(
        7,
        "the child has our other variables",
        "self._environment = others | config.machine.settings()",
        "self._environment = config.machine.settings()",
        DAEMON + "finds_paramiko",
    ),
    Break(
        7,
        "a second disk is answered",
        "            seconds = NEXT_PROMPT_SECONDS\n",
        "            return Result.of(Outcome.UNLOCKED, 'd', sent=True)\n",
        UNLOCK + "each_disk",
    ),
    Break(
        7,
        "a verdict from before the answer does not count",
        '        self._lines.clear()\n        self._rest = ""\n',
        "",
        HOSTILE + "advance",
    ),
    Break(
        7,
        "a verdict that waits in the channel does not count",
        "        while self._channel.recv_ready() and self._received <= MAX_OUTPUT:\n"
        "            self._receive()\n",
        "",
        HOSTILE + "in_the_channel",
    ),
    Break(
        7,
        "`opened X` counts only if X was answered",
        "while event is Outcome.UNLOCKED and not set(named) & set(disks):",
        "while event is Outcome.UNLOCKED and not named:",
        HOSTILE + "'another and disk'",
    ),
    Break(
        7,
        "a disk that was opened is not answered later",
        "            self._answered.update(named)\n",
        "",
        HOSTILE + "'reported and open'",
    ),
    Break(
        7,
        "a 17th disk is not answered",
        "MAX_DISKS: Final = 16",
        "MAX_DISKS: Final = 17",
        HOSTILE + "ever",
    ),
    Break(
        7,
        "16 disks are answered",
        "MAX_DISKS: Final = 16",
        "MAX_DISKS: Final = 15",
        HOSTILE + "sixteen",
    ),
    Break(
        7,
        "a disk on which systemd gave up is no success",
        '                if why.result.outcome == "gave_up":  # on another disk\n',
        '                if why.result.outcome == "none":\n',
        HOSTILE + "gives",
    ),
    Break(
        7,
        "after 1 MiB of output the connection is closed",
        "MAX_OUTPUT: Final = 1 << 20",
        "MAX_OUTPUT: Final = 1 << 40",
        HOSTILE + "sends_too_much",
    ),
    Break(
        7,
        "a name that contains the passphrase is hidden",
        'shown = ["a disk" if secret in disk else disk for disk in disks]',
        "shown = [*disks]",
        HOSTILE + "repeats",
    ),
    Break(
        7,
        "a reported name has at most 200 characters",
        "disk[:200] for disk in shown",
        "disk[:500] for disk in shown",
        HOSTILE + "KB",
    ),
    Break(
        7,
        "the list of names has at most 600 characters",
        "limit: int = 600",
        "limit: int = 6000",
        HOSTILE + "thousand",
    ),
    Break(
        7,
        "an unlock limits its memory",
        "            resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))\n",
        "            pass\n",
        HOSTILE + "exhaust",
    ),
    Break(
        7,
        "a first prompt may take 60 s",
        "PROMPT_SECONDS: Final = 60",
        "PROMPT_SECONDS: Final = 1",
        FIGURES,
    ),
    # ---- 8. Start --------------------------------------------------------------------
    Break(
        8,
        "a packet every 10 s while the machine is silent",
        "packet_seconds: float = 10",
        "packet_seconds: float = 60",
        FIGURES,
    ),
    Break(
        8,
        "ten minutes for the initrd",
        "start_seconds: float = 600",
        "start_seconds: float = 60",
        FIGURES,
    ),
    Break(
        8,
        "again every 5 s while nothing asks",
        "retry_seconds: float = 5",
        "retry_seconds: float = 0",
        FIGURES,
    ),
    Break(
        8,
        "a pause between two tries",
        "            self._pause(start, self._config.retry_seconds)\n",
        "",
        START + "not_asked_again",
    ),
    Break(
        8,
        "two minutes until something asks",
        "prompt_seconds: float = 120",
        "prompt_seconds: float = 12",
        FIGURES,
    ),
    Break(
        8,
        "doubt after 45 s",
        "doubt_seconds: float = 45",
        "doubt_seconds: float = 4",
        FIGURES,
    ),
    Break(
        8,
        "no doubt at once",
        "is_late = now >= began + self._config.doubt_seconds",
        "is_late = now >= began",
        START + "doubted",
    ),
    Break(
        8,
        "doubt only while the initrd runs",
        "            if not confirmed and is_late and ports.initrd is PortState.OPEN:\n",
        "            if not confirmed and is_late:\n",
        START + "has_ended",
    ),
    Break(
        8,
        "in the phase `booting`, a new start is accepted",
        "            if was_claiming and phase not in CLAIMING:\n",
        "            if was_claiming and phase in ENDINGS:\n",
        START + "replaces",
    ),
    Break(
        8,
        "an unlock ends a watch, which keeps what it had",
        "self._report(start, Phase.CANCELLED, start.outcome, start.message)",
        'self._report(start, Phase.CANCELLED, "cancelled", "Cancelled")',
        START + "ends_a_watch",
    ),
    Break(
        8,
        "an unlock ends a watch",
        "        app.starter.end_watch()\n        result",
        "        result",
        START + "ends_a_watch",
    ),
    Break(
        8,
        "a cancel before the passphrase was sent kills the process",
        "            if unwanted or time.monotonic() > deadline:\n",
        "            if time.monotonic() > deadline:\n",
        START + "lets_the_rest_finish",
    ),
    Break(
        8,
        "a cancel after it was sent lets the unlock finish",
        "unwanted = cancelled.is_set() and not sent.is_set()",
        "unwanted = cancelled.is_set()",
        START + "lets_the_rest_finish",
    ),
    Break(
        8,
        "a cancelled watch keeps what the unlock reported",
        "raise Ended(Phase.CANCELLED, result.outcome, message)",
        'raise Ended(Phase.CANCELLED, "cancelled", "Cancelled.")',
        START + "cancelled_watch",
    ),
    Break(
        8,
        "SIGTERM cancels a start",
        "    with contextlib.suppress(Fault):  # after the server: no new start can begin\n"
        "        app.starter.cancel()\n",
        "",
        START + "signal",
    ),
    Break(
        8,
        "a start that must fail wakes nobody: no pinned key",
        "        if not self._machine.host_keys:\n            problem = NOT_PINNED\n",
        "",
        START + "wakes_nobody",
    ),
    Break(
        8,
        "a start that must fail wakes nobody: no key file",
        "        problem = SSH_KEY.find_problem(self._machine.key)\n        if problem:\n"
        '            problem = f"SSH key {problem}"\n',
        '        problem = ""\n',
        START + "wakes_nobody",
    ),
    Break(
        8,
        "a start that must fail wakes nobody: no paramiko",
        '        if not importlib.util.find_spec("paramiko"):',
        '        if not importlib.util.find_spec("os"):',
        DAEMON + "without_paramiko",
    ),
    Break(
        8,
        "when the port opens after `not_confirmed`, the message begins with it",
        'parts = ["The system is up.", result.message]',
        'parts = [result.message, "The system is up."]',
        START + "doubted",
    ),
    # ---- 9. HTTP ---------------------------------------------------------------------
    Break(
        9,
        "a head has at most 16 KiB",
        "MAX_HEAD: Final = 16384",
        "MAX_HEAD: Final = 16385",
        HTTP + "16384",
    ),
    Break(
        9,
        "a head has at most 100 fields",
        "MAX_FIELDS: Final = 100",
        "MAX_FIELDS: Final = 101",
        HTTP + "bad_request",
    ),
    Break(
        9,
        "100 fields are accepted",
        "MAX_FIELDS: Final = 100",
        "MAX_FIELDS: Final = 99",
        HTTP + "odd_request",
    ),
    Break(
        9,
        "Transfer-Encoding is 501",
        'raise Fault(501, "Transfer-Encoding',
        'raise Fault(400, "Transfer-Encoding',
        HTTP + "bad_request",
    ),
    Break(
        9,
        "a repeated Content-Length or Host is refused",
        "        if name in fields and name in ONCE:\n",
        '        if name in fields and name == "date":\n',
        HTTP + "bad_request",
    ),
    Break(
        9,
        "an odd Content-Length is refused",
        'if not re.fullmatch("0|[1-9][0-9]{0,17}", length):',
        'if not re.fullmatch(" *[0-9]+ *", length):',
        HTTP + "bad_request",
    ),
    Break(
        9,
        "a missing Host is refused",
        'fields.get("host", "").encode',
        'fields.get("host", "none").encode',
        HTTP + "bad_request",
    ),
    Break(
        9,
        "a body has at most 16 KiB",
        "MAX_BODY: Final = 16384",
        "MAX_BODY: Final = 16383",
        HTTP + "odd_request",
    ),
    Break(
        9,
        "a longer body is refused",
        "MAX_BODY: Final = 16384",
        "MAX_BODY: Final = 16385",
        HTTP + "bad_request",
    ),
    Break(
        9,
        "a request has 10 s",
        "CLIENT_SECONDS: Final = 10",
        "CLIENT_SECONDS: Final = 15",
        FIGURES,
    ),
    Break(
        9,
        "the 10 s are for the whole request, not for each part",
        "        self._tcp.settimeout(left)\n",
        "        self._tcp.settimeout(CLIENT_SECONDS)\n",
        HTTP + "ten_seconds",
    ),
    Break(
        9,
        "a client has 2 s to close",
        "DRAIN_SECONDS: Final = 2 ",
        "DRAIN_SECONDS: Final = 8 ",
        FIGURES,
    ),
    Break(
        9,
        "waker waits for the client to close",
        "            self.drain()\n",
        "",
        HTTP + "who_sends_on",
    ),
    Break(
        9,
        "64 connections at a time",
        "MAX_CONNECTIONS: Final = 64",
        "MAX_CONNECTIONS: Final = 65",
        HTTP + "64_threads",
    ),
    Break(
        9,
        "the busiest client makes room",
        "        if most > 6:",
        "        if most > 600:",
        HTTP + "busiest",
    ),
    Break(
        9,
        "six connections are no more than one",
        "        if most > 6:",
        "        if most > 1:",
        HTTP + "six",
    ),
    Break(
        9,
        "all clients of a proxy are one",
        "            group = group_client(client_address[0])\n",
        "            group = str(client_address)\n",
        HTTP + "busiest or proxy_are_one",
    ),
    Break(
        9,
        "a request that has arrived makes no room",
        "        for tcp in select.select(reading, [], [], 0)[0]:\n"
        "            del waiting[tcp]  # its thread is about to read something\n",
        "",
        HTTP + "last_moment or arrived",
    ),
    Break(
        9,
        "a request that runs makes no room",
        "            connection.mark(State.BUSY)\n            response",
        "            connection.mark(State.WRITING)\n            response",
        HTTP + "unlock_stays or arrived",
    ),
    Break(
        9,
        "a closed connection is marked",
        "        self.state = State.DROPPED\n",
        "        pass\n",
        HTTP + "150 or arrived or busiest",
    ),
    Break(
        9,
        "a lack of descriptors does not end the serving thread",
        "            raise OSError from error  # any other would end the serving thread\n",
        "            raise\n",
        HTTP + "in_accepting",
    ),
    Break(
        9,
        "no name is looked up",
        "socketserver.BaseServer.__init__(self, tcp.getsockname()[:2], Handler)",
        "super().__init__(tcp.getsockname()[:2], Handler, bind_and_activate=False); "
        "socket.getfqdn(tcp.getsockname()[0])",
        HTTP + "no_name",
    ),
    Break(
        9,
        "TLS has one curve",
        '    context.set_ecdh_curve("prime256v1")\n'
        "    with contextlib.suppress(ssl.SSLError):  # Python 3.11.2, as in Debian 12, fails\n"
        '        context.set_ecdh_curve("X25519")\n',
        "",
        HTTP + "ffdhe",
    ),
    Break(
        9,
        "TLS has AEAD ciphers only",
        '    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # from TLS 1.2 on\n',
        "",
        HTTP + "ffdhe",
    ),
    Break(
        9,
        "a TLS handshake is made in the connection's thread",
        "do_handshake_on_connect=False",
        "do_handshake_on_connect=True",
        HTTP + "half_a_handshake",
    ),
    Break(
        9,
        "X-Forwarded-For counts only from a trusted proxy",
        "        while hops and in_networks(client, proxies):\n",
        "        while hops:\n",
        HTTP + "whom_the_proxy_saw",
    ),
    Break(
        9,
        "the last address that is no proxy is the client",
        "            client = plain_address(hops.pop().strip",
        "            client = plain_address(hops.pop(0).strip",
        HTTP + "whom_the_proxy_saw",
    ),
    Break(
        9,
        "foreign text in the log is escaped",
        'return re.sub("[^ -~]", lambda odd: ascii(odd[0])[1:-1], text)',
        "return text",
        "test_properties.py -k log",
    ),
    Break(
        9,
        "the log never blocks",
        "        if select.select([], [2], [], 0)[1]:\n",
        "        if text:\n",
        HTTP + "nobody_reads",
    ),
    Break(
        9,
        "a trusted proxy is not named in the log",
        "    if not in_networks(client, app.config.proxies):\n",
        "    if client:\n",
        DAEMON + "trusted_proxy",
    ),
    Break(
        9,
        "Cross-Origin-Resource-Policy is sent",
        '            "Cross-Origin-Resource-Policy": "same-origin",\n',
        "",
        API + "private",
    ),
    Break(
        9,
        "trusted types are required",
        "        \" require-trusted-types-for 'script'\"\n",
        "",
        API + "own_code",
    ),
    Break(
        9,
        "a second ^C ends it at once",
        "    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second signal ends it at once\n",
        "",
        DAEMON + "second_signal",
    ),
    # ---- The page -------------------------------------------------------------------
    Break(
        8,
        "another host key is an alarm",
        '  if (start?.outcome === "host_key_differs") return "foreign";\n',
        "",
        PAGE + "an_alarm",
        "ui.html",
    ),
    Break(
        8,
        "a disk on which systemd gave up is an alarm",
        'return asks && start?.outcome === "gave_up" ? "stuck" : state;',
        "return state;",
        PAGE + "an_alarm",
        "ui.html",
    ),
    Break(
        8,
        "a start that was not confirmed offers another passphrase",
        'return asks && start.outcome === "not_confirmed" ? "doubtful" : "starting";',
        'return "starting";',
        PAGE + "did_not_confirm",
        "ui.html",
    ),
    Break(
        8,
        "an initrd that waits is not taken for unlocked",
        "  if (isRunning(status)) {\n    return asks",
        "  if (isRunning(status) || asks) {\n    return asks",
        PAGE + "one_passphrase or two_secrets or wrong_passphrase",
        "ui.html",
    ),
    Break(
        8,
        "the end of a start that was watched is news; another one is the last",
        '[!watched && "Last time:",',
        '["Last time:",',
        PAGE + "kept_and_can_be_mended",
        "ui.html",
    ),
    Break(
        8,
        "a wrong passphrase is kept",
        'if (["booting", "done", "cancelled"].includes(phase)) forget();',
        "forget();",
        PAGE + "kept_and_can_be_mended",
        "ui.html",
    ),
    Break(
        8,
        "a wrong passphrase that ends with a space is told so",
        'page.spaced = given.endsWith(" ");',
        "page.spaced = false;",
        PAGE + "kept_and_can_be_mended",
        "ui.html",
    ),
    Break(
        8,
        "only what was typed now is marked as wrong",
        "const isWrong = page.given && status",
        "const isWrong = status",
        PAGE + "marks_nothing",
        "ui.html",
    ),
    Break(
        8,
        "the passphrase leaves the page once it has done its work",
        '  passphrase.value = "";\n  page.given',
        "  page.given",
        PAGE + "two_secrets or cancelled",
        "ui.html",
    ),
    Break(
        8,
        "a shown passphrase is hidden when the page is left",
        "function wakeUp() {\n  reveal(false);\n",
        "function wakeUp() {\n",
        PAGE + "not_seen",
        "ui.html",
    ),
    Break(
        8,
        "a page that is not seen asks for nothing",
        "  if (document.hidden) return;\n  const pause",
        "  const pause",
        PAGE + "not_seen",
        "ui.html",
    ),
    Break(
        8,
        "a page that is seen again asks at once",
        "if (token && !document.hidden) poll();\n",
        "",
        PAGE + "not_seen",
        "ui.html",
    ),
    Break(
        8,
        "an older answer never replaces a newer one",
        "if (mine > counted && token) receive(next);",
        "if (token) receive(next);",
        PAGE + "an_older_answer",
        "ui.html",
    ),
    Break(
        8,
        "a late 401 does not end a new token",
        'if (expired && token === used) token = "";',
        'if (expired) token = "";',
        PAGE + "late_401",
        "ui.html",
    ),
    Break(
        8,
        "at most two polls at a time",
        "  if (flying.size > 1) return;\n",
        "",
        PAGE + "hangs_is_told",
        "ui.html",
    ),
    Break(
        8,
        "a second poll is sent after 3 s",
        "flying.has(polls) ? 3000 : every()",
        "flying.has(polls) ? 30000 : every()",
        PAGE + "hangs_is_told",
        "ui.html",
    ),
    Break(
        8,
        "an answer is late 8 s after its poll was sent",
        "age > every + 8000",
        "age > every + 80000",
        PAGE + "hangs_is_told",
        "ui.html",
    ),
    Break(
        8,
        "a missed check keeps the last state",
        'next.state = ended && phase === "done" ? "up" : status.state;',
        'next.state = "unknown";',
        PAGE + "missed_check",
        "ui.html",
    ),
    Break(
        8,
        "a machine that is up is asked every 10 s",
        "? 10_000 : 1000;",
        "? 1000 : 1000;",
        PAGE + "left_in_peace",
        "ui.html",
    ),
    Break(
        8,
        "a start is made once",
        "  if (page.busy || page.note?.until > Date.now()) return;\n",
        "  if (page.note?.until > Date.now()) return;\n",
        PAGE + "made_once",
        "ui.html",
    ),
    Break(
        8,
        "too many attempts are counted down",
        "error.seconds ? Date.now() + error.seconds * 1000 : undefined",
        "undefined",
        PAGE + "counted_down",
        "ui.html",
    ),
    Break(
        8,
        "what is typed outlives the token",
        'page.asking ||= !(shownIn(page).includes("start-form") && passphrase.value);',
        "page.asking = true;",
        PAGE + "expires",
        "ui.html",
    ),
    Break(
        8,
        "a start that waker forgot is told",
        'if (ended && !next.start && next.state !== "up"',
        'if (ended && next.start && next.state !== "up"',
        PAGE + "restart_of_waker",
        "ui.html",
    ),
    Break(
        8,
        "a lost answer to a start says that the passphrase may have arrived",
        "      if (!error.lost) throw error;\n",
        "      throw error;\n",
        PAGE + "network_that_is_lost",
        "ui.html",
    ),
    Break(
        8,
        "over HTTP there is a warning",
        'if (isSecureContext || memory.warned) element("insecure").remove();',
        'element("insecure").remove();',
        PAGE + "plain_http",
        "ui.html",
    ),
    Break(
        8,
        "a machine can be woken alone",
        'off: ["Off", silent, "ring", "passphrase", [...FORM, "wake"]],',
        'off: ["Off", silent, "ring", "passphrase", FORM],',
        PAGE + "woken_alone",
        "ui.html",
    ),
    Break(
        8,
        "the usual duration is the longest of the last five",
        "const usual = Math.max(0, ...memory.seconds);",
        "const usual = Math.min(9999, ...memory.seconds);",
        PAGE + "usual_duration",
        "ui.html",
    ),
    Break(
        8,
        "an exception is told",
        '  window.addEventListener("error", fail);\n',
        "",
        PAGE + "exception_later or one_sentence",
        "ui.html",
    ),
)


class Tester:
    """Runs tests in copies of the checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _run(self, copy: Path, tests: str) -> tuple[int, int]:
        """Run tests; return how many failed while they ran, and the status."""
        report = copy / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "--timeout=150"]
        first, *others = shlex.split(tests)
        if others:
            others = [others[0], " ".join(others[1:])]
        command += [f"tests/{first}", *others]
        ended = subprocess.run(command, cwd=copy, capture_output=True, check=False)
        failures = ET.parse(report).getroot().findall(".//failure")
        return len(failures), ended.returncode

    def judge(self, each: Break | str) -> str:
        """Say what is wrong with a row, or with tests on the unbroken program."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            copy = Path(name) / "copy"
            ignored = shutil.ignore_patterns(".git", ".venv*", ".vm", "*_cache")
            shutil.copytree(CHECKOUT, copy, ignore=ignored)
            if isinstance(each, str):
                _, status = self._run(copy, each)
                return f"fails unbroken: {each}" if status else ""
            file = copy / each.file
            file.write_text(file.read_text().replace(each.old, each.new))
            if each.file.endswith(".py"):
                compile(file.read_text(), each.file, "exec")
            failures, status = self._run(copy, each.tests)
            if failures and status == 1:
                return ""
            return f"survived ({status}): {each.section}. {each.promise}: {each.tests}"


def main(words: Sequence[str]) -> int:
    """Break each promise, or those with all of these words; print the survivors."""
    rows = [row for row in BREAKS if all(word in str(row) for word in words)]
    unbroken = sorted({row.tests for row in rows})
    with tempfile.TemporaryDirectory() as name:
        tester = Tester(Path(name))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = 0
            for told in filter(None, pool.map(tester.judge, [*unbroken, *rows])):
                print(told, flush=True)
                found += 1
    print(f"{len(rows)} breaks, {found} survivors")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

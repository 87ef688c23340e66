#!/bin/sh
# Run prepare.py on a server, as root. box/prepare.py sends this in ssh's command line,
# with the files of this folder and the arguments of prepare.py for the words in @.

if python3 -c 'import sys; sys.exit(sys.version_info >= (3, 11))' 2>/dev/null; then
    echo 'The server needs Debian 12 or Ubuntu 24.04, or later. Its Python is too old.'
    exit 1
elif ! python3 -c 'import json' 2>/dev/null; then
    echo 'The server needs Python 3.11 or later, with all its parts. Debian 12, Ubuntu 24.04'
    echo 'and later have it. As root, run this there:'
    echo '    apt install python3'
    exit 1
fi

folder=$(mktemp -d) || exit
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
echo @FILES@ | base64 -d | tar -xzo -C "$folder" || exit

# -B: root would leave a folder that this user cannot remove.
set -- python3 -B "$folder/prepare.py" @ARGUMENTS@
if [ "$(id -u)" = 0 ]; then
    "$@"
# Only sudo knows whether this user may use it. It then remembers the password.
elif command -v sudo >/dev/null && sudo true; then
    sudo "$@"
else # a Debian without sudo has a root password
    echo "The server's root password is needed."
    su -s /bin/sh -c 'exec "$@"' -- root sh "$@"
fi

# What `systemd-cryptsetup` does about a passphrase, three times at most.
#
#   sh cryptsetup.sh FOLDER DISK
#
# The prompt is made by systemd's own `systemd-ask-password`. FOLDER/keys/DISK holds the
# passphrase; to FOLDER/tried go all that it was given; at the end it makes
# FOLDER/opened/DISK or FOLDER/failed/DISK. DERIVATION, in the environment, is how many
# seconds a key derivation takes.

folder=$1 disk=$2
for _ in 1 2 3; do
    given=$(systemd-ask-password --no-tty --timeout=0 --id="cryptsetup:/dev/$disk" \
        "Please enter passphrase for disk $disk:")
    printf '%s %s\n' "$disk" "$given" >>"$folder/tried"
    sleep "${DERIVATION:-0.2}"
    if [ "$given" = "$(cat "$folder/keys/$disk")" ]; then
        exec touch "$folder/opened/$disk"
    fi
done
touch "$folder/failed/$disk"

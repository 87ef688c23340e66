# What `systemd-cryptsetup` does about a disk.
#
#   sh cryptsetup.sh FOLDER DISK
#
# systemd's own `systemd-ask-password` makes the prompt, in what /proc shows as the disk's
# unit. FOLDER/keys/DISK holds the passphrase, and FOLDER/options those of crypttab. To
# FOLDER/tried go all passphrases that were given; at the end it makes FOLDER/opened/DISK
# or FOLDER/failed/DISK.

folder=$1 disk=$2
tries=$(sed -n 's/.*tries=//p' "$folder/options")
unit=$(systemd-escape --template=systemd-cryptsetup@.service "$disk")
cgroup=$folder/units/$disk
printf '%s\n' "0::/system.slice/a\x2db.slice/$unit" >"$cgroup"
# shellcheck disable=SC2016 # another shell expands it
in_unit='mount --bind "$0" /proc/$$/cgroup; exec "$@"'
number=0
until [ $((number += 1)) -gt "${tries:=3}" ] && [ "$tries" != 0 ]; do
    given=$(sh -c "$in_unit" "$cgroup" systemd-ask-password --no-tty --timeout=0 \
        --id="cryptsetup:/dev/$disk" "Please enter passphrase for disk $disk:")
    printf '%s %s\n' "$disk" "$given" >>"$folder/tried"
    sleep 0.2 # a key derivation takes its time
    if [ "$given" = "$(cat "$folder/keys/$disk")" ]; then
        exec touch "$folder/opened/$disk"
    fi
done
touch "$folder/failed/$disk"

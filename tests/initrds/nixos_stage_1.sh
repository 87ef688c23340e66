# NixOS's scripted stage 1, as far as it concerns passphrases; for busybox's shell.
#
#   sh nixos_stage_1.sh FOLDER DISK...
#
# It behaves as luksroot.nix of nixpkgs does: one disk after the other, each until it is
# open, with a passphrase that is found in a file, or is reused. Beside it runs
# cryptsetup-askpass, which has its name and its texts from there, too.
#
# FOLDER/keys has the passphrases, under the last parts of the disks' names; a derivation
# takes FOLDER/seconds; to FOLDER/opened go the disks that are open, and to FOLDER/tried
# all that was given.

folder=$1
shift
for disk; do
    while :; do
        until [ -e "$folder/passphrase" ]; do
            [ -e "$folder/device" ] || echo -n "$disk" >"$folder/device"
            sleep 0.1 # in NixOS, it reads the console for a second
        done
        given=$(cat "$folder/passphrase")
        printf '%s %s\n' "$disk" "$given" >>"$folder/tried"
        sleep "$(cat "$folder/seconds")"
        [ "$given" = "$(cat "$folder/keys/${disk##*/}")" ] && break
        rm "$folder/passphrase"
    done
    echo "$disk" >>"$folder/opened"
done

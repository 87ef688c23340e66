#!/bin/sh
# `systemctl is-active` for cryptsetup.sh's disks and the target that waits for them;
# FOLDER stands for its folder.

[ -e FOLDER/silent ] && exit 1 # as without a connection to systemd
target=active
for disk in $(ls FOLDER/keys); do
    if [ -e "FOLDER/opened/$disk" ]; then
        echo active
        continue
    fi
    target=inactive
    if [ -e "FOLDER/failed/$disk" ]; then echo failed; else echo activating; fi
done
[ -e FOLDER/over ] && target=inactive # as when the initrd makes way for the system
echo $target

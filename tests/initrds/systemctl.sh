#!/bin/sh
# `systemctl is-active` for cryptsetup.sh's disks and the target that waits for them, if
# they are asked for; FOLDER stands for its folder.

[ -e FOLDER/silent ] && exit 1 # as without a connection to systemd
target=active
for disk in $(ls FOLDER/keys); do
    state=activating
    [ -e "FOLDER/failed/$disk" ] && state=failed
    [ -e "FOLDER/opened/$disk" ] && state=active
    [ $state = active ] || target=inactive
    case " $* " in *' systemd-cryptsetup@*.service '*) echo $state ;; esac
done
[ -e FOLDER/over ] && target=inactive # as when the initrd makes way for the system
case " $* " in *' cryptsetup.target '*) echo $target ;; esac

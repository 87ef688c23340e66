#!/bin/sh
# The parts of `systemctl` that our cryptroot-unlock needs, for the disks of
# cryptsetup.sh; FOLDER stands for its folder.

show_state() {
    if [ -e "FOLDER/opened/$1" ]; then
        echo active
    elif [ -e "FOLDER/failed/$1" ]; then
        echo failed
    else
        echo activating
    fi
}
for unit; do :; done # the last argument
case $* in
    'is-active systemd-cryptsetup@*.service')
        for file in FOLDER/keys/*; do
            [ ! -e "$file" ] || show_state "${file##*/}"
        done
        exit
        ;;
esac
disk=$(systemd-escape --unescape --instance "$unit")
case $* in
    is-active\ *) show_state "$disk" ;;
    *=Description\ *) echo "Cryptography Setup for $disk" ;;
    *=ExecStart\ *)
        options=$(cat FOLDER/options)
        echo "{ argv[]=systemd-cryptsetup attach $disk /dev/x none luks$options ; }"
        ;;
esac

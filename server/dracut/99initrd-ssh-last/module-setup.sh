#!/bin/bash
# A dracut module: the last word on files that other modules write as well, if the image
# is for this computer alone. dracut's own module crypt writes etc/crypttab anew, and the
# module systemd-networkd adds the owner's network, with all its cards.
#
# shellcheck disable=SC2154 # dracut sets moddir and initdir

check() {
    return 255 # include it only if initrd-ssh does
}

install() {
    mv "$initdir/etc/initrd-ssh/crypttab" "$initdir/etc/crypttab"
    rm -f "$initdir"/etc/systemd/network/*.{network,netdev}
    # They come before those that systemd makes of the kernel's ip=.
    inst_simple /etc/initrd-ssh/lan.network /etc/systemd/network/00-lan.network
    inst_simple "$moddir/others.network" /etc/systemd/network/01-others.network
}

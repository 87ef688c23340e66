#!/bin/bash
# A dracut module: the last word on etc/crypttab. It comes after dracut's own module
# crypt, which writes that file anew in an image for this computer alone.
#
# shellcheck disable=SC2154 # dracut sets initdir

check() {
    return 255 # include it only if initrd-ssh does
}

install() {
    mv "$initdir/etc/initrd-ssh/crypttab" "$initdir/etc/crypttab"
}

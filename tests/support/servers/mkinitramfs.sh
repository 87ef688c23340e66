#!/bin/sh
# Makes an image as Debian's mkinitramfs does, as far as prepare.py looks into it.
#
#   mkinitramfs.sh IMAGE
#
# The file spoil, beside this one, may change what goes into it.
set -eu
image=$1 here=$(realpath "${0%/*}") folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p bin conf/conf.d cryptroot etc/dropbear root-x/.ssh sbin
touch sbin/cryptsetup sbin/dropbear bin/cryptroot-unlock
cp /etc/initramfs-tools/conf.d/* conf/conf.d 2>/dev/null || true
cp /etc/crypttab cryptroot/crypttab
cp /etc/dropbear/initramfs/dropbear* etc/dropbear
cp /etc/dropbear/initramfs/authorized_keys root-x/.ssh || true
# The hooks of initramfs-tools find its functions here. One needs a device, or never ends.
mkdir -p /usr/share/initramfs-tools
echo 'manual_add_modules() { :; }; sys_walk_mod_add() { [ "$1" ] || exit 1; }' \
    >/usr/share/initramfs-tools/hook-functions
for hook in /etc/initramfs-tools/hooks/*; do
    [ ! -x "$hook" ] || DESTDIR=$folder "$hook"
done
. "$here/spoil"
find . | cpio --quiet -o -H newc | gzip >"$image"
echo built >>"$here/built"

#!/bin/sh
# Makes an image as Debian's mkinitramfs does, as far as prepare.py looks into it.
#
#   mkinitramfs.sh IMAGE
#
# Without dropbear-initramfs, which a file in FOLDER stands for, it has no SSH server.
set -eu
image=$1 folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p bin conf/conf.d cryptroot etc/dropbear root-x/.ssh sbin
touch sbin/cryptsetup
cp /etc/initramfs-tools/conf.d/* conf/conf.d 2>/dev/null || true
cp /etc/crypttab cryptroot/crypttab
if [ -e FOLDER/dropbear-initramfs ]; then
    touch sbin/dropbear bin/cryptroot-unlock
    cp /etc/dropbear/initramfs/dropbear* etc/dropbear
    cp /etc/dropbear/initramfs/authorized_keys root-x/.ssh || true
fi
# The hooks of initramfs-tools find its functions here.
mkdir -p /usr/share/initramfs-tools
echo 'manual_add_modules() { :; }; sys_walk_mod_add() { :; }' \
    >/usr/share/initramfs-tools/hook-functions
for hook in /etc/initramfs-tools/hooks/*; do
    [ ! -x "$hook" ] || DESTDIR=$folder "$hook"
done
find . | cpio --quiet -o -H newc | gzip >"$image"
echo built >>FOLDER/built

#!/bin/bash
# A dracut module: OpenSSH in an initrd that systemd runs, for unlocking its disks.
#
# It wants three files, which are not those of the installed system:
#   /etc/initrd-ssh/host_key          made by ssh-keygen; this is the key to pin
#   /etc/initrd-ssh/host_key.pub
#   /etc/initrd-ssh/authorized_keys   who may unlock
# and the network from /etc/systemd/network.

check() {
    require_binaries sshd sleep || return 1
    return 255 # only where it was asked for
}

depends() {
    echo systemd-cryptsetup systemd-networkd
}

install() {
    inst_multiple sshd sleep
    # from OpenSSH 9.8 on, these take over from the listener
    inst_multiple -o /usr/lib/openssh/sshd-session /usr/lib/openssh/sshd-auth \
        /usr/libexec/openssh/sshd-session /usr/libexec/openssh/sshd-auth
    inst_multiple /etc/initrd-ssh/* /etc/systemd/network/*.network
    inst_simple "$moddir/sshd_config" /etc/initrd-ssh/sshd_config
    inst_simple "$moddir/initrd-ssh.service" \
        "$systemdsystemunitdir/initrd-ssh.service"
    grep '^sshd:' /etc/passwd >>"$initdir/etc/passwd"
    # sshd refuses every key of an account that is locked by `!`
    echo 'root:*:::::::' >>"$initdir/etc/shadow"
    $SYSTEMCTL -q --root "$initdir" enable initrd-ssh.service
}

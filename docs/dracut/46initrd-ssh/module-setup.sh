#!/bin/bash
# A dracut module: OpenSSH in a systemd initrd, so that waker can unlock the disks.
# docs/initrds.md shows how to use it. It needs these files in /etc/initrd-ssh, apart
# from those of the installed system:
#
#   lan.network      network settings for systemd-networkd
#   authorized_keys  who may log in, and which command each key may run
#   unlock           the command that waker's key runs
#   host_key         the initrd's own host key; made here if there is none

check() {
    local file
    require_binaries sshd ssh-keygen sleep || return 1
    # If this fails, dracut stops and leaves the old image alone.
    for file in lan.network authorized_keys unlock; do
        [[ -s /etc/initrd-ssh/$file ]] && continue
        derror "initrd-ssh: /etc/initrd-ssh/$file is missing or empty"
        return 1
    done
    return 255 # include the module only if the configuration names it
}

depends() {
    echo systemd-cryptsetup systemd-networkd
}

install() {
    local name
    [[ -e /etc/initrd-ssh/host_key ]] ||
        ssh-keygen -q -t ed25519 -N '' -C initrd -f /etc/initrd-ssh/host_key
    inst_multiple sshd sleep
    # OpenSSH 9.8 and later has a program for each connection, and 10 one for the login.
    inst_multiple -o /usr/lib/openssh/sshd-session /usr/lib/openssh/sshd-auth \
        /usr/libexec/openssh/sshd-session /usr/libexec/openssh/sshd-auth
    # sshd refuses root if the initrd lacks root's login shell. With busybox installed,
    # dracut may leave out bash, although systemd-sysusers makes it that shell.
    inst_multiple -o bash "$(sed -n 's/^root:.*://p' /etc/passwd)"
    for name in host_key host_key.pub authorized_keys unlock; do
        inst_simple "/etc/initrd-ssh/$name"
    done
    inst_simple /etc/initrd-ssh/lan.network /etc/systemd/network/lan.network
    inst_simple /etc/crypttab
    inst_simple "$moddir/sshd_config" /etc/initrd-ssh/sshd_config
    inst_simple "$moddir/initrd-ssh.service" \
        "$systemdsystemunitdir/initrd-ssh.service"
    grep '^sshd:' /etc/passwd >>"$initdir/etc/passwd"
    # sshd refuses every key of an account that is locked by `!`.
    echo 'root:*:::::::' >>"$initdir/etc/shadow"
    $SYSTEMCTL -q --root "$initdir" enable initrd-ssh.service
}

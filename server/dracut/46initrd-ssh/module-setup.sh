#!/bin/bash
# A dracut module: OpenSSH in a systemd initrd, so that waker can unlock the disks.
# docs/server.md shows how to use it. It needs these files in /etc/initrd-ssh, apart
# from those of the installed system:
#
#   lan.network      network settings for systemd-networkd
#   authorized_keys  who may log in, and which command each key may run
#   host_key         the initrd's own host key; made here if there is none
#
# shellcheck disable=SC2154 # dracut sets moddir, initdir and others

# List what / and /usr are on, down to the disks: name, type, transport. Nothing if that
# cannot be told.
list_devices() {
    local devices
    mapfile -t devices < <(
        findmnt --noheadings --nofsroot --output SOURCES /
        findmnt --noheadings --nofsroot --output SOURCES /usr
    )
    [[ ${devices[*]} ]] || return 0
    lsblk --noheadings --list --inverse --output NAME,TYPE,TRAN "${devices[@]}" 2>/dev/null
}

list_root_disks() {
    local name type _
    list_devices | while read -r name type _; do
        [[ $type != crypt ]] || echo "$name"
    done
}

# Print the lines of crypttab that the initrd needs: those of the root disks, and those
# with x-initrd.attach. A disk whose key file is on the root disk would ask for its
# passphrase in the initrd. If no root disk is known, print all lines.
#
# Whoever is asked may be wrong any number of times, unless the line has its own tries=.
# With x-initrd.attach, the disk stays attached until the end of the shutdown.
print_crypttab() {
    local roots name device key options uuid _
    roots=" $(list_root_disks | tr '\n' ' ')"
    while read -r name device key options _ || [[ $name ]]; do
        [[ $name && $name != '#'* ]] || continue
        # Without mdadm.conf, an array may have another number.
        [[ $device == /dev/md* ]] &&
            uuid=$(blkid --output value --match-tag UUID "$device") &&
            device=UUID=$uuid
        if [[ $roots == ' ' || $roots == *" $name "* ]] ||
            [[ ,$options, == *,x-initrd.attach,* ]]; then
            if [[ ${key:-none} == none || $key == - ]]; then
                [[ ,$options, == *,x-initrd.attach,* ]] ||
                    options=${options:-luks},x-initrd.attach
                [[ ,$options == *,tries=* ]] || options+=,tries=0
            fi
            echo "$name $device ${key:-none} $options"
        else
            dwarn "initrd-ssh: the initrd will not unlock $name; if it must, add the" \
                "option x-initrd.attach to its line in /etc/crypttab"
        fi
    done </etc/crypttab
}

# Print parameters of the kernel that name the RAID arrays. An image that is not only for
# this host assembles no others.
print_arrays() {
    local name type _
    list_devices | while read -r name type _; do
        [[ $type != raid* ]] || mdadm --detail --export "/dev/$name"
    done | sed -n 's/^MD_UUID=/rd.md.uuid=/p' | sort -u
}

check() {
    local file disk name type transport
    require_binaries sshd ssh-keygen ip sleep lsblk findmnt || return 1
    # If this fails, dracut stops and leaves the old image alone.
    for file in lan.network authorized_keys; do
        [[ -s /etc/initrd-ssh/$file ]] && continue
        derror "initrd-ssh: /etc/initrd-ssh/$file is missing or empty"
        return 1
    done
    while read -r name type transport; do
        [[ $transport == iscsi || $name == nbd* ]] || continue
        derror "initrd-ssh: the root file system needs the network ($name), which this" \
            "module takes down before the system boots"
        return 1
    done < <(list_devices)
    for disk in $(list_root_disks); do
        grep -q "^${disk}[[:space:]]" /etc/crypttab && continue
        derror "initrd-ssh: the root file system is on $disk, but no line of" \
            "/etc/crypttab begins with that name"
        return 1
    done
    return 255 # include the module only if the configuration names it
}

depends() {
    echo systemd-cryptsetup systemd-networkd initrd-ssh-last
}

install() {
    local name
    inst_simple "$moddir/cryptroot-unlock" /usr/bin/cryptroot-unlock
    inst_multiple cat ip sed sleep systemctl systemd-ask-password \
        "$systemdutildir/systemd-reply-password"
    mkdir -p "$initdir/etc/initrd-ssh" "$initdir/etc/cmdline.d"
    print_crypttab >"$initdir/etc/initrd-ssh/crypttab" # for initrd-ssh-last
    print_arrays >"$initdir/etc/cmdline.d/46initrd-ssh.conf"
    [[ -s /etc/initrd-ssh/host_key ]] || {
        rm -f /etc/initrd-ssh/host_key
        ssh-keygen -q -t ed25519 -N '' -C initrd -f /etc/initrd-ssh/host_key
        sync /etc/initrd-ssh/host_key*
    }
    inst_multiple sshd
    # OpenSSH 9.8 and later has a program for each connection, and 10 one for the login.
    inst_multiple -o /usr/lib/openssh/sshd-session /usr/lib/openssh/sshd-auth \
        /usr/libexec/openssh/sshd-session /usr/libexec/openssh/sshd-auth
    # sshd refuses root if the initrd lacks root's login shell. With busybox installed,
    # dracut may leave out bash, although systemd-sysusers makes it that shell.
    inst_multiple -o bash "$(sed -n 's/^root:.*://p' /etc/passwd)"
    for name in host_key host_key.pub authorized_keys; do
        inst_simple "/etc/initrd-ssh/$name"
    done
    inst_simple "$moddir/sshd_config" /etc/initrd-ssh/sshd_config
    inst_simple "$moddir/clean-card" /usr/bin/clean-card
    for name in initrd-ssh clean-card; do
        inst_simple "$moddir/$name.service" "$systemdsystemunitdir/$name.service"
        $SYSTEMCTL -q --root "$initdir" enable "$name.service"
    done
    grep '^sshd:' /etc/passwd >>"$initdir/etc/passwd"
    # sshd refuses every key of an account that is locked by `!`.
    echo 'root:*:::::::' >>"$initdir/etc/shadow"
}

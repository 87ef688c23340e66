#!/bin/sh
# What prepare.py wants to know about the server: each function here is a probe. None
# changes anything. One that finds nothing prints nothing.
#
#   probes.sh NAME [ADDRESS]    print what the probe NAME finds; ADDRESS is the box's

box=${2-}

system() { cat /etc/os-release; }

# In Debian 13, a package of its own has it.
systemd_cryptsetup() { ls /usr/lib/systemd/systemd-cryptsetup; }

init() { [ -d /run/systemd/system ] || echo none; }

# Package, whether it is wanted, whether it is installed.
packages() { dpkg-query -Wf '${Package} ${db:Status-Want} ${db:Status-Status}\n'; }

# ---- Disks ----

file_systems() { findmnt -no FSTYPE -T /; findmnt -no FSTYPE -T /boot; }

# What / and /usr are on, from the file system down to the disks: name, type, transport.
disks() {
    for folder in / /usr; do
        findmnt -nvo SOURCES -T $folder | xargs -r lsblk -nlso NAME,TYPE,TRAN
    done
}

# What is wrong with /boot. Listing it first triggers an automount.
boot() {
    ls /boot >/dev/null
    findmnt --fstab --mountpoint /boot >/dev/null &&
        ! findmnt --kernel --mountpoint /boot >/dev/null && echo unmounted
    [ -w /boot ] || echo read-only
}

# What swap space is on, as in disks.
swap() { swapon --noheadings --raw --show=NAME | xargs -r lsblk -nlso NAME,TYPE; }

boot_disks() { findmnt -nvo SOURCES -T /boot | xargs -r lsblk -nlso NAME,TYPE,TRAN; }

crypttab() { cat /etc/crypttab; }

# Open LUKS disks: the name, and the header's metadata, with its tokens. LUKS1 has none.
tokens() {
    lsblk -nrpo NAME,PKNAME,TYPE | while read -r disk device type; do
        [ "$type" = crypt ] || continue
        printf '%s ' "${disk##*/}"
        if cryptsetup isLuks --type luks1 "$device"; then
            printf '{}'
        else
            cryptsetup luksDump --dump-json-metadata "$device" | tr -d '\n'
        fi
        echo
    done
}

# ---- Network ----

links() { ip -j -d address; }

# The route to the box comes first.
routes() {
    case $box in *.*.*.*) ip -j -4 route get "$box" ;; esac
    ip -j -4 route show default
}

# Physical cards, each with the kernel modules that drive it.
drivers() {
    for card in /sys/class/net/*; do
        [ -e "$card/device" ] || continue
        # shellcheck disable=SC2046 # as words of one line
        echo "${card##*/}" $(readlink -e "$card/device/driver/module" \
            "$card/phydev/driver/module")
    done
}

# Drivers of the cards that a kernel lacks: kernel, module.
missing_drivers() {
    for kernel in $(kernels); do
        for module in $(drivers | sed 's/^[^ ]*//'); do
            module=${module##*/}
            modinfo -k "$kernel" "$module" >/dev/null || echo "$kernel $module"
        done
    done
}

wifi() { ls -d /sys/class/net/*/phy80211; }

# Cards to which a .link file gives a MAC address: card, file, setting. (In the section
# [Match], the same word only tells which cards the file is for.)
link_macs() {
    # shellcheck disable=SC2016 # awk's variables
    for card in /sys/class/net/*; do
        udevadm info --query=property "$card" |
            sed -n 's/^ID_NET_LINK_FILE\(_DROPINS\)\{0,1\}=//p' | tr ':' '\n' |
            xargs -r awk -v card="${card##*/}" '
                FNR == 1 { is_link = 0 }
                /^[ \t]*\[/ { is_link = /\[Link\]/ }
                is_link && /^[ \t]*MACAddress(Policy[ \t]*=[ \t]*random|[ \t]*=[ \t]*.)/ {
                    print card, FILENAME, $0
                }
            '
    done
}

# On the loopback interface, sshd forwards the ports of those who are logged in.
ssh_ports() {
    ss -Hltnp | sed -n '/"sshd"/s/^[^:]* \([^ ]*:[0-9]*\) .*/\1/p' |
        grep -v '^127\.\|^\[::1\]'
    ! systemctl --quiet is-active ssh.socket || systemctl show -P Listen ssh.socket
}

# Where anything listens: address and port. `*` is any address, of IPv6 and IPv4.
listening() { ss -Hltn | awk '{ print $4 }'; }

# ---- The initrd ----

# The owner's address for Debian's initrd, which reads its settings and the kernel's in
# this order. conf.d/waker is prepare.py's, or waker 3.0's.
own_ip() (
    IP=
    for file in /etc/initramfs-tools/initramfs.conf /etc/initramfs-tools/conf.d/*; do
        case ${file##*/} in waker* | *.dpkg-* | *[!0-9A-Za-z._-]*) continue ;; esac
        # shellcheck source=/dev/null
        [ ! -f "$file" ] || . "$file"
    done
    read -r line </proc/cmdline
    for word in $line; do
        case $word in ip=*) IP=${word#ip=} ;; esac
    done
    [ ! "$IP" ] || echo "IP=$IP"
)

own_options() (
    # shellcheck source=/dev/null
    . /etc/dropbear/initramfs/dropbear.conf && echo "${DROPBEAR_OPTIONS-}"
)

# Each file of dracut's settings, in its order, with the modules omitted so far.
omitted() {
    # shellcheck disable=SC2016 # bash's variables
    bash -c '
        etc=/etc/dracut.conf.d lib=/usr/lib/dracut/dracut.conf.d
        for file in /etc/dracut.conf $(ls $etc $lib | grep "\.conf\$" | sort -Vu); do
            case $file in
                /*) ;;
                *) [ -e "$etc/$file" ] && file=$etc/$file || file=$lib/$file ;;
            esac
            [ ! -e "$file" ] || . "$file" >/dev/null
            echo "$file" $omit_dracutmodules
        done
    '
}

# From the oldest to the newest.
kernels() {
    linux-version list | linux-version sort | while read -r kernel; do
        [ ! -e "/lib/modules/$kernel" ] || echo "$kernel"
    done
}

running() { uname -r; }

kernel_options() { cat /proc/cmdline; }

images() { ls /boot; }

# The boot loader's name, if it sets the variable of systemd's Boot Loader Interface. A
# unified kernel image sets the second one.
boot_loader() {
    for name in LoaderInfo StubInfo; do
        variable=/sys/firmware/efi/efivars/$name-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f
        [ ! -e $variable ] || printf '%s\n' "$(tr -cd '[:print:]' <$variable)"
    done
    [ ! -e /etc/kernel/proxmox-boot-uuids ] || echo proxmox-boot-tool
}

grub() { cat /boot/grub/grub.cfg; }

menu() { cat /boot/grub/custom.cfg; }

"$1"


finish() { printf 'waker: %s\n' "$*"; exit 1; }
find_prompts() { # sets `new`: disks that ask; and `again`: those that were answered
    new='' again='' marks=''
    for file in /run/systemd/ask-password/ask.*; do
        id='' disk=''
        while IFS='=' read -r name text; do
            case $name in Id) id=$text ;; Message) disk=${text#*disk } ;; esac
        done 2>/dev/null <"$file" || continue
        case $id in cryptsetup:*) disk=${disk%:} ;; *) finish foreign ;; esac
        case $answered in
            *"<$file>"*) ;;
            *"<$disk>"*) again="$again, $disk" ;;
            *) new="$new, $disk" marks="$marks<$file><$disk>" ;;
        esac
    done
}
find_verdict() { # combined state of all disks; `waiting` if systemd reports nothing
    verdict=waiting
    case $(systemctl is-active 'systemd-cryptsetup@*.service' cryptsetup.target) in
        *activating*) ;;
        *failed*) verdict=dead ;;
        *inactive*) ;;
        *active*) verdict=opened ;;
    esac
}
[ "$(command -v printf)" = printf ] || exit 127
command -v systemd-tty-ask-password-agent >/dev/null || exit 127
[ -e /etc/initrd-release ] || finish booted
answered='' names='' count=0
while find_verdict && find_prompts && [ ! "$new" ]; do
    [ $verdict = opened ] && finish settled
    if [ $((count += 1)) -gt 20 ]; then
        [ $verdict = dead ] && finish dead
        finish idle
    fi
    sleep 0.5
done
printf 'waker: asks %s\n' "${new#, }"
IFS= read -r passphrase || exit 1
while find_verdict && find_prompts && [ $((count += 1)) -lt 1200 ]; do
    printf '\n' || exit 1 # waker has gone: forget the passphrase
    [ "$again" ] && finish rejected "${again#, }"
    if [ "$new" ]; then
        while printf '%s\n' "$passphrase"; do :; done 2>/dev/null |
            systemd-tty-ask-password-agent --query >/dev/null 2>&1
        answered=$answered$marks names=$names$new
    elif [ $verdict = dead ]; then
        finish dead
    elif [ $verdict = opened ]; then
        [ "$names" ] && finish opened "${names#, }"
        finish settled # someone else answered first
    fi
    sleep 0.1 # short: the verdict must be sent before the system boots
done
exit 1


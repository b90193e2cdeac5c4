#!/bin/sh
# Purpose: other RabbitMQs, those of other Debian releases, unpacked into folders of their own
# outside the repository. They are not installed; dev/broker.py starts them by chroot, as root.
#
#   dev/unpack.sh SUITE     bookworm 3.10, trixie 4.0, forky 4.3
#   dev/unpack.sh all       all three
#
# Prints each folder, for RABBITMQ_ROOT. A second run only prints.
set -eu
suites=${1:?which Debian release: bookworm, trixie, forky or all?}
[ "$suites" != all ] || suites="bookworm trixie forky"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kombu_binary_delay/brokers

say() { echo "unpack: $*" >&2; }
die() { say "$*"; exit 1; }

install_tools() {
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if command -v mmdebstrap >/dev/null && [ -e $keyring ]; then return; fi
    command -v apt-get >/dev/null ||
        die "no apt-get here: install mmdebstrap and debian-archive-keyring, then try again"
    say "apt-get install mmdebstrap debian-archive-keyring"
    apt-get update -qq >&2
    apt-get install -q -y --no-install-recommends mmdebstrap debian-archive-keyring >&2
}

# One at a time.
mkdir -p "$cache"
exec 9<"$cache"
flock 9

for suite in $suites; do
    root=$cache/$suite
    if [ ! -d "$root" ]; then
        [ "$(id -u)" = 0 ] || die "to unpack and start the RabbitMQ of $suite takes root: use" \
            "sudo, or 'make test' for the RabbitMQ that is installed"
        install_tools
        say "the RabbitMQ of $suite into $root"
        rm -rf "$root.partial"
        # An old release may be kept with an index that is past its date.
        mmdebstrap --quiet --variant=apt --include=rabbitmq-server \
            --aptopt='Acquire::Check-Valid-Until "false"' "$suite" "$root.partial" >&2 ||
            die "mmdebstrap has failed for $suite, see above"
        mv "$root.partial" "$root"
    fi
    echo "$root"
done

#!/bin/sh
# Purpose: another RabbitMQ, the one of another Debian release, unpacked into a folder of its own
# outside the repository. It is not installed; lab/broker.py starts it by chroot, as root.
#
#   lab/unpack.sh SUITE     bullseye 3.8, bookworm 3.10, trixie 4.0, forky 4.3
#
# Prints the folder, for RABBITMQ_ROOT. A second run only prints.
set -eu
suite=${1:?which Debian release: bullseye, bookworm, trixie or forky?}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kombu_binary_delay/brokers
root=$cache/$suite

if [ ! -d "$root" ]; then
    if ! command -v mmdebstrap >/dev/null; then
        apt-get update -qq >&2
        apt-get install -q -y --no-install-recommends mmdebstrap >&2
    fi
    mkdir -p "$cache"
    rm -rf "$root.partial"
    # An old release may be kept with an index that is past its date.
    mmdebstrap --quiet --variant=apt --include=rabbitmq-server \
        --aptopt='Acquire::Check-Valid-Until "false"' "$suite" "$root.partial" >&2
    mv "$root.partial" "$root"
fi
echo "$root"

#!/bin/sh
# Purpose: make a fresh Debian or Ubuntu ready for `make`: a virtual environment in .venv with
# the project and one of its dependency groups and, for what needs it, RabbitMQ from the
# distribution. Whatever is there already is left as it is; a second run does nothing.
#
#   lab/install.sh GROUP       a dependency group of pyproject.toml: test, demo, docs, dev
#   PYTHON=python3.12 lab/install.sh test
set -eu
cd "$(dirname "$0")/.."
group=${1:?which dependency group of pyproject.toml?}

say() { echo "install: $*" >&2; }
die() { say "$*"; exit 1; }

apt_install() {
    say "apt-get install $*"
    command -v apt-get >/dev/null || die "no apt-get here: install $* yourself, then try again"
    if [ "$(id -u)" = 0 ]; then sudo=; else
        command -v sudo >/dev/null || die "to install $*, be root or have sudo"
        sudo=sudo
    fi
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends "$@" >&2
}

is_usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if is_usable "$python"; then
            echo "$python"
            return
        fi
    done
    die "no Python >= 3.10 among ${PYTHON:-python3 and python3.10 to python3.14}"
}

install_broker() {
    # What tests and demo use when RABBITMQ_ROOT names another broker is not our business.
    if [ -n "${RABBITMQ_ROOT:-}" ] || [ -e /usr/lib/rabbitmq/bin/rabbitmq-server ]; then return; fi
    had_epmd=$(command -v epmd || true)
    apt_install rabbitmq-server
    # The package may have started a broker for the whole machine. We asked for the program only.
    if [ -d /run/systemd/system ]; then
        $sudo systemctl disable --now --quiet rabbitmq-server || true
        [ -n "$had_epmd" ] || $sudo systemctl disable --now --quiet epmd.socket epmd || true
    fi
}

install_project() {
    # The place belongs to the stamp, because a virtual environment cannot be moved.
    wanted=$({ pwd; "$python" -VV; cat pyproject.toml constraints.txt setup.cfg; } | sha256sum)
    stamp=.venv/installed-$group
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    # Debian has this part of the standard library in a package of its own.
    "$python" -c 'import ensurepip' 2>/dev/null ||
        apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    say "the project and its group '$group' into .venv"
    case $(cat .venv/made-for 2>/dev/null) in
        "$(pwd) $("$python" -VV)") ;;
        *)
            "$python" -m venv --clear .venv
            echo "$(pwd) $("$python" -VV)" >.venv/made-for
            ;;
    esac
    # The first pip that knows dependency groups is 25.1.
    .venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
    .venv/bin/python -m pip install --quiet --group "$group" --editable . --constraint constraints.txt
    echo "$wanted" >"$stamp"
}

python=$(find_python)
case $group in test | demo | dev) install_broker ;; esac
install_project

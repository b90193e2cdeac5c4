#!/bin/sh
# Purpose: make a fresh Debian or Ubuntu ready for `make`: a virtual environment in .venv with
# the project and one of its dependency groups and, for what runs a broker, RabbitMQ from the
# distribution; for the tests, also Prometheus and Chromium. Whatever is there already is left as
# it is; a second run does nothing.
#
#   dev/install.sh GROUP       a dependency group of pyproject.toml: demo, pipeline, bench, test, ...
#   dev/install.sh GROUP system       only what is outside of .venv, for tox, which has its own
#   PYTHON=python3.12 dev/install.sh test
set -eu
cd "$(dirname "$0")/.."
group=${1:?which dependency group of pyproject.toml?}
part=${2:-all}
server=/usr/lib/rabbitmq/bin/rabbitmq-server
prometheus=/usr/bin/prometheus

say() { echo "install: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    die "no Python >= 3.10 among ${PYTHON:-python3 and python3.10 to python3.14}"
}

missing_packages() {
    case $group in docs) ;; *)
        # RABBITMQ_ROOT and RABBITMQ_URL name another broker, see tests/conftest.py.
        [ -n "${RABBITMQ_ROOT:-}${RABBITMQ_URL:-}" ] || [ -e $server ] || echo rabbitmq-server
        # Celery needs time zones, which minimal systems lack.
        [ -e /usr/share/zoneinfo/UTC ] || echo tzdata
    esac
    case $group in test | dev)
        [ -e $prometheus ] || echo prometheus # and promtool: alerting rules are tested on it
        # The report is printed. Ubuntu has no browser in its packages.
        command -v chromium >/dev/null || ! grep -q '^ID=debian' /etc/os-release || echo chromium
    esac
    # Spark runs on Java.
    case $group in pipeline | bench | test | dev)
        command -v java >/dev/null || echo default-jre-headless
    esac
    # Debian has this part of the standard library in a package of its own.
    [ -e .venv ] || "$python" -c 'import ensurepip' 2>/dev/null ||
        "$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'
}

apt_install() {
    say "apt-get install" "$@"
    command -v apt-get >/dev/null || die "no apt-get here: install $* yourself, then try again"
    if [ "$(id -u)" = 0 ]; then sudo=; else
        command -v sudo >/dev/null || die "to install $*, be root or have sudo"
        sudo=sudo
    fi
    had_server=$(ls $server 2>/dev/null || true)
    had_epmd=$(command -v epmd || true)
    had_prometheus=$(ls $prometheus 2>/dev/null || true)
    $sudo apt-get update -qq
    output=$($sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "$@" 2>&1) || die "$output"
    # With the program may have come a service for the whole machine, which nobody asked for.
    if [ -d /run/systemd/system ]; then
        [ -n "$had_server" ] || [ ! -e $server ] ||
            $sudo systemctl disable --now --quiet rabbitmq-server || true
        [ -n "$had_prometheus" ] || [ ! -e $prometheus ] ||
            $sudo systemctl disable --now --quiet prometheus || true
        [ -n "$had_epmd" ] || $sudo systemctl disable --now --quiet epmd.socket epmd || true
    fi
}

install_project() {
    # The place is a part of it: a virtual environment cannot be moved.
    base="$(pwd) $("$python" -VV)"
    wanted=$({ echo "$base"; cat pyproject.toml constraints.txt setup.cfg; } | sha256sum)
    if [ "$(cat ".venv/installed-$group" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "the project and its group '$group' into .venv"
    if [ "$(cat .venv/made-for 2>/dev/null)" != "$base" ]; then
        "$python" -m venv --clear .venv
        echo "$base" >.venv/made-for
    fi
    pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -qq"
    $pip 'pip>=25.1' # the first that knows dependency groups
    $pip --group "$group" --editable . --constraint constraints.txt
    rm -f .venv/spark-classes.jsa
    echo "$wanted" >".venv/installed-$group"
}

python=$(find_python)
missing=$(missing_packages)
# shellcheck disable=SC2086 # one word is one package
[ -z "$missing" ] || apt_install $missing
[ "$part" != system ] || exit 0
install_project
case $group in test | dev)
    # Spark's Python processes import PySpark from this archive, which has no bytecode: that takes a
    # second of CPU for each. The same modules are beside it.
    rm -f .venv/lib/python3.*/site-packages/pyspark/python/lib/pyspark.zip
    # While nothing else runs: among the tests, it would take minutes. They do without it as well.
    [ -e .venv/spark-classes.jsa ] || { say "an archive of Spark's classes into .venv" &&
        .venv/bin/python -m tests.spark_classes; } || true
esac

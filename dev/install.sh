#!/bin/sh
# Purpose: make a fresh Debian or Ubuntu ready for `make`: a virtual environment in .venv with
# the project and one of its dependency groups and, for what runs a broker, RabbitMQ from the
# distribution; for the tests, also Prometheus and Chromium. Whatever is there already is left as
# it is, also a virtual environment of yours; a second run does nothing.
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

# One at a time, where the system has locks: `make -j lint docs` starts two.
exec 9<dev
lock=0
flock -n 9 2>/dev/null || lock=$?
[ "$lock" != 1 ] || { say "waits for another that runs" && flock 9; }

# Whether .venv is a virtual environment that this script has not made, or a link to one. Then it is
# used, with its Python.
is_yours() {
    { [ -e .venv/bin/python ] || [ -e .venv/pyvenv.cfg ]; } &&
        { [ -L .venv ] || [ ! -e .venv/made-for ]; }
}

# Whether .venv has to be made, since there is none, or one for another place or Python.
is_to_be_made() { ! is_yours && [ "$(cat .venv/made-for 2>/dev/null)" != "$base" ]; }

find_python() {
    names="python3 python3.14 python3.13 python3.12 python3.11"
    ! is_yours || names=.venv/bin/python
    for python in ${PYTHON:-$names}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    die "no Python >= 3.11 among ${PYTHON:-$names}: name one, as in PYTHON=python3.12"
}

# PySpark 4 runs on Java 17 and later, and looks for it in JAVA_HOME first.
has_java() {
    major=$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 |
        sed -n 's/.* version "\([0-9]*\).*/\1/p')
    [ "${major:-0}" -ge 17 ]
}

missing_packages() {
    case $group in docs) ;; *)
        # These name another broker; the second is for the tests alone, see tests/conftest.py.
        other=${RABBITMQ_ROOT:-}
        case $group in test | dev) other=$other${RABBITMQ_URL:-} ;; esac
        [ -n "$other" ] || [ -e $server ] || echo rabbitmq-server
        # Celery needs time zones, which minimal systems lack.
        [ -e /usr/share/zoneinfo/UTC ] || echo tzdata
    esac
    case $group in test | dev)
        [ -e $prometheus ] || echo prometheus # and promtool: alerting rules are tested on it
        # The report is printed. Ubuntu has no browser in its packages.
        command -v chromium >/dev/null || ! grep -q '^ID=debian' /etc/os-release || echo chromium
    esac
    case $group in pipeline | bench | test | dev)
        if has_java; then :
        # The default of these releases is 11.
        elif grep -qE 'CODENAME=(bullseye|focal|jammy)' /etc/os-release; then
            echo openjdk-17-jre-headless
        else
            echo default-jre-headless
        fi
    esac
    # Debian has this part of the standard library in a package of its own.
    ! is_to_be_made || "$python" -c 'import ensurepip' 2>/dev/null ||
        "$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'
}

apt_install() ( # in a process of its own, for its trap
    say "apt-get install" "$@"
    command -v apt-get >/dev/null || die "no apt-get here: install $* yourself, then try again"
    if [ "$(id -u)" = 0 ]; then sudo=; else
        command -v sudo >/dev/null || die "to install $*, be root or have sudo"
        sudo=sudo
    fi
    # With a program may come a service for the whole machine, which nobody asked for.
    new=
    if [ -d /run/systemd/system ]; then
        for service in rabbitmq-server prometheus epmd.socket epmd; do
            systemctl cat $service >/dev/null 2>&1 || new="$new $service"
        done
    fi
    # It may be there even if the installation fails.
    trap 'for service in $new; do
        $sudo systemctl disable --now --quiet $service 2>/dev/null || true
    done' EXIT
    trap 'exit 130' INT TERM
    $sudo apt-get update -qq
    output=$($sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "$@" 2>&1) || die "$output"
)

install_project() {
    wanted=$({ echo "$base"; cat pyproject.toml constraints.txt setup.cfg; } | sha256sum)
    if [ "$(cat ".venv/installed-$group" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "the project and its group '$group' into .venv"
    if is_to_be_made; then
        [ ! -L .venv ] || rm .venv
        mkdir -p .venv
        # Not removed: it may be a mount point.
        [ ! -e .venv/made-for ] || find .venv -mindepth 1 ! -path .venv/made-for -delete
        # From the beginning: if this is interrupted, it is made again.
        : >.venv/made-for
        "$python" -m venv .venv
        echo "$base" >.venv/made-for
    fi
    [ "$(.venv/bin/python -VV)" = "$("$python" -VV)" ] ||
        die "the Python of .venv is not $python: remove .venv, and one is made for that"
    .venv/bin/python -m pip --version >/dev/null 2>&1 ||
        die "no pip in .venv: run '.venv/bin/python -m ensurepip', or remove .venv"
    pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -qq"
    $pip 'pip>=25.1' # the first that knows dependency groups
    $pip --group "$group" --editable . --constraint constraints.txt
    rm -f .venv/spark-classes.jsa
    echo "$wanted" >".venv/installed-$group"
}

python=$(find_python)
# The place is a part of it: a virtual environment cannot be moved.
base="$(pwd) $("$python" -VV)"
missing=$(missing_packages)
if [ "$missing" ]; then
    # Without the lock, which a service that it starts would keep.
    # shellcheck disable=SC2086 # one word is one package
    apt_install $missing 9<&-
    missing=$(missing_packages)
    [ -z "$missing" ] ||
        die "installed, and yet not found: $missing; see PATH and, for Java 17, JAVA_HOME"
fi
[ "$part" != system ] || exit 0
install_project
case $group in test | dev)
    # Spark's Python processes import PySpark from this archive, which has no bytecode: that takes a
    # second of CPU for each. The same modules are beside it.
    is_yours || rm -f .venv/lib/python3.*/site-packages/pyspark/python/lib/pyspark.zip
    # While nothing else runs: among the tests, these would take minutes. They do without them as well.
    [ -e .venv/spark-classes.jsa ] || {
        say "an archive of Spark's classes into .venv" && .venv/bin/python -m tests.spark_classes
        # Pytest compiles tests in its own way: once here, or once in each of its workers.
        say "the tests' bytecode" && env -u PYTHONDONTWRITEBYTECODE \
            .venv/bin/python -m pytest --collect-only -qq >/dev/null
    } || true
esac

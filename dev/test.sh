#!/bin/sh
# Purpose: what `make test` runs, and a continuous integration with it.
#
#   dev/test.sh             all tests on the installed RabbitMQ, but for the conformance suite, which
#                           runs on both ends of the range: RabbitMQ 3.8 and 4.3. These are unpacked
#                           if need be and started by chroot, which takes root, or sudo.
#   dev/test.sh ARGUMENT... pytest with these arguments, on the installed RabbitMQ
#
# With RABBITMQ_ROOT or RABBITMQ_URL, see tests/conftest.py, everything runs on that one alone.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

if [ $# != 0 ] || [ -n "${RABBITMQ_ROOT:-}${RABBITMQ_URL:-}" ]; then
    exec $python -m pytest "$@"
fi

if [ "$(id -u)" = 0 ]; then sudo=; else
    command -v sudo >/dev/null || {
        echo "test: RabbitMQ 3.8 and 4.3 are started by chroot: be root or have sudo, or run" \
            "'make test-here', which tests on the installed RabbitMQ alone" >&2
        exit 1
    }
    sudo="sudo env PYTHONDONTWRITEBYTECODE=1"
fi
# Before all else, since it is this that may be impossible here.
oldest=$($sudo dev/unpack.sh bullseye)
newest=$($sudo dev/unpack.sh forky)

conformance_on() {
    $sudo env RABBITMQ_ROOT="$1" $python -m pytest -p no:cacheprovider tests/conformance
}

# A failure in one part is no reason to know nothing of the others.
failed=0
$python -m pytest --ignore=tests/conformance || failed=1
# Side by side, since both wait most of the time.
log=$(mktemp)
conformance_on "$oldest" >"$log" 2>&1 &
conformance_on "$newest" || failed=1
wait $! || failed=1
cat "$log"
rm "$log"
exit $failed

#!/bin/sh
# Purpose: what `make test` runs, and a continuous integration with it.
#
#   dev/test.sh             all tests on the installed RabbitMQ, but for the conformance suite, which
#                           runs on both ends of the range: RabbitMQ 3.10 and 4.3. These are unpacked
#                           if need be and started by chroot, which takes root, or sudo that asks
#                           for no password. And beside the tests: style, types, the import
#                           contract, and the documentation.
#   dev/test.sh --here      the same, but all tests on the installed RabbitMQ alone
#   dev/test.sh ARGUMENT... pytest with these arguments, on the installed RabbitMQ, and nothing else
#
# With RABBITMQ_ROOT or RABBITMQ_URL, see tests/conftest.py, everything runs on that one alone.
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
python=$PWD/.venv/bin/python
# Tests wait most of the time: three for each of the two cores that they were measured on.
workers=6

here=
[ "${1:-}" != --here ] || { here=yes && shift; }
if [ $# != 0 ]; then exec "$python" -m pytest "$@"; fi
if [ -n "${RABBITMQ_ROOT:-}${RABBITMQ_URL:-}" ]; then here=yes; fi

if [ "$here" ] || [ "$(id -u)" = 0 ]; then sudo=; else
    # In the background, where a password that was given at a terminal may not count.
    setsid --wait sudo -n true 2>/dev/null || {
        echo "test: RabbitMQ 3.10 and 4.3 are started by chroot: be root, or have sudo that asks for" \
            "no password, or run 'make test-here', which tests on the installed RabbitMQ alone" >&2
        exit 1
    }
    sudo="sudo env PYTHONDONTWRITEBYTECODE=1"
fi
if [ -z "$here" ]; then
    # Before all else, since it is this that may be impossible here.
    oldest=$($sudo dev/unpack.sh bookworm)
    newest=$($sudo dev/unpack.sh forky)
fi

folder=$(mktemp -d)
parts=
# Each part is a process group of its own, so that it can be ended as a whole.
end() {
    for part in $parts; do $sudo kill -- "-${part#*:}" 2>/dev/null || true; done
    $sudo rm -rf "$folder"
}
trap end EXIT
trap 'exit 130' INT TERM

begin() {
    name=$1
    shift
    setsid "$@" >"$folder/$name.log" 2>&1 &
    parts="$parts $name:$!"
}

# What each part has covered is combined at the end. On one broker alone, it is less.
covered=
[ "$here" ] || covered="--cov --cov-report= --cov-fail-under=0"
# One after the other: side by side, they would take from the tests that start Java what those need.
# shellcheck disable=SC2016 # it is the inner shell that expands
conformance='
    failed=0 again=
    for each in "oldest $1" "newest $2"; do
        COVERAGE_FILE=$3/coverage.${each%% *} RABBITMQ_ROOT=${each#* } \
            "$4" -m pytest -p no:cacheprovider $5 ${again:+-k "not walk"} tests/conformance ||
            failed=1
        again=yes # what needs no broker is the same on each
    done
    exit $failed'

begin lint nice dev/check.sh lint
begin docs nice dev/check.sh docs "$folder/html"
ignored=
if [ -z "$here" ]; then
    # shellcheck disable=SC2086 # one word is one argument
    begin conformance $sudo sh -c "$conformance" - "$oldest" "$newest" "$folder" "$python" "$covered"
    ignored=--ignore=tests/conformance
fi

# A failure in one part is no reason to know nothing of the others.
failed=
# shellcheck disable=SC2086
COVERAGE_FILE=$folder/coverage.main "$python" -m pytest -n $workers $covered $ignored ||
    failed="$failed tests"
for part in $parts; do
    name=${part%%:*}
    status=0
    wait "${part#*:}" || status=$?
    echo
    echo "== $name =="
    cat "$folder/$name.log"
    [ $status = 0 ] || failed="$failed $name"
done
parts=

if [ "$covered" ]; then
    echo
    echo "== coverage of the mechanism =="
    $sudo chmod -R a+rw "$folder"
    # Kept for `make coverage`, in .coverage.
    "$python" -m coverage erase
    "$python" -m coverage combine --quiet "$folder"/coverage.* &&
        "$python" -m coverage report || failed="$failed coverage"
fi

[ -z "$failed" ] || { echo "test: failed:$failed" >&2 && exit 1; }

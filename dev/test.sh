#!/bin/sh
# Purpose: what `make test` and `make test-all` run, and a continuous integration with them.
#
#   dev/test.sh             style, types, the import contract and the documentation; then all tests
#                           that are not marked slow, on the installed RabbitMQ
#   dev/test.sh --all       the same, then the slow tests, and the conformance suite on both ends of
#                           the range, RabbitMQ 3.10 and 4.3. These are unpacked if need be and
#                           started by chroot, which takes root, or sudo that asks for no password
#   dev/test.sh ARGUMENT... pytest with these arguments, on the installed RabbitMQ, and nothing else
#
# With RABBITMQ_ROOT or RABBITMQ_URL, see tests/conftest.py, everything runs on that one alone.
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
python=$PWD/.venv/bin/python
# The tests start some hundred processes of Python, each of which would compile our modules anew.
unset PYTHONDONTWRITEBYTECODE
# Tests wait most of the time: three for each of the two cores that they were measured on.
workers=6

all=
[ "${1:-}" != --all ] || { all=yes && shift; }
if [ $# != 0 ]; then exec "$python" -m pytest "$@"; fi
one=${RABBITMQ_ROOT:-}${RABBITMQ_URL:-}

sudo=
if [ "$all" ] && [ -z "$one" ]; then
    if [ "$(id -u)" != 0 ]; then
        # In the background, where a password that was given at a terminal may not count.
        setsid --wait sudo -n true 2>/dev/null || {
            echo "test: RabbitMQ 3.10 and 4.3 are started by chroot: be root, or have sudo that asks" \
                "for no password, or test on one broker: RABBITMQ_URL=... make test-all" >&2
            exit 1
        }
        sudo="sudo env PYTHONDONTWRITEBYTECODE=1"
    fi
    # Before all else, since it is this that may be impossible here.
    oldest=$($sudo dev/unpack.sh bookworm)
    newest=$($sudo dev/unpack.sh forky)
fi

folder=$(mktemp -d)
docs=
end() {
    [ -z "$docs" ] || kill "$docs" 2>/dev/null || true
    $sudo rm -rf "$folder"
}
trap end EXIT
trap 'exit 130' INT TERM

# A failure in one part is no reason to know nothing of the others.
failed=
part() {
    name=$1
    shift
    printf '\n== %s ==\n' "$name"
    "$@" || failed="$failed $name"
}
# Coverage has a limit for all tests together, on every broker, and takes time. What each part has
# covered is combined at the end.
run() {
    data=$1
    shift
    [ -z "$all" ] || set -- --cov --cov-report= --cov-fail-under=0 "$@"
    COVERAGE_FILE=$folder/coverage.$data "$python" -m pytest -n $workers "$@"
}
conformance() {
    $sudo env COVERAGE_FILE="$folder/coverage.$1" RABBITMQ_ROOT="$2" "$python" -m pytest \
        -n $workers --cov --cov-report= --cov-fail-under=0 -p no:cacheprovider \
        -k "not walk" tests/conformance # what needs no broker is the same on each
}

# These are one process each. They come before the tests, whose processors they would take.
dev/check.sh docs "$folder/html" >"$folder/docs.log" 2>&1 &
docs=$!
part lint dev/check.sh lint
status=0
wait "$docs" || status=$?
docs=
part docs sh -c 'cat "$1"; exit "$2"' - "$folder/docs.log" $status

part tests run tests -m "not slow"
if [ "$all" ] && [ "$one" ]; then
    part slow-tests run slow -m slow
elif [ "$all" ]; then
    part slow-tests run slow -m slow --ignore=tests/conformance
    part conformance-on-the-oldest conformance oldest "$oldest"
    part conformance-on-the-newest conformance newest "$newest"
fi

if [ "$all" ]; then
    printf '\n== coverage of the mechanism ==\n'
    $sudo chmod -R a+rw "$folder"
    # Kept for `make coverage`, in .coverage.
    "$python" -m coverage erase
    "$python" -m coverage combine --quiet "$folder"/coverage.*
    limit=
    [ -z "$one" ] || limit=--fail-under=0
    # shellcheck disable=SC2086 # none, where there is a limit in pyproject.toml
    "$python" -m coverage report $limit || failed="$failed coverage"
fi

[ -z "$failed" ] || { echo "test: failed:$failed" >&2 && exit 1; }

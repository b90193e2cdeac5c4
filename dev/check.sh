#!/bin/sh
# Purpose: what is checked beside the tests. `make`, tox and dev/test.sh run these same commands, with
# the tools that come first in PATH. All run, even if one fails; the last line then says which.
#
#   dev/check.sh lint           style, types, the import contract and spelling
#   dev/check.sh docs FOLDER    the documentation, built into a folder; a warning is an error
set -eu
cd "$(dirname "$0")/.."
what=${1:?lint or docs?}
failed=

run() {
    echo "\$ $*"
    "$@" || failed="$failed, $1"
}

case $what in
lint)
    run ruff check
    run ruff format --check
    run mypy
    run lint-imports
    run codespell --dictionary - --dictionary dev/words.txt \
        benchmarks dev docs kombu_binary_delay tests *.md *.toml *.cfg *.ini Makefile
    ;;
docs) run sphinx-build --fail-on-warning --keep-going --quiet docs "${2:?into which folder?}" ;;
*)
    echo "check: lint or docs, not $what" >&2
    exit 2
    ;;
esac
[ -z "$failed" ] || { echo "check: failed: ${failed#, }" >&2 && exit 1; }

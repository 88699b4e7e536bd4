#!/usr/bin/env bash
#
# Runs the end-to-end case on every combination of versions and prints a table:
#   tests/measure/matrix.sh [--list] [--only NAME] [--keep DIRECTORY]
#
# Run by hand: it downloads gigabytes and takes half an hour, or minutes when --keep has kept the environments of an
# earlier call. matrix.py says what it does; PYTHON picks the interpreter that runs it, not those that are tried.
set -euo pipefail

exec "${PYTHON:-python3}" "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/matrix.py" "$@"

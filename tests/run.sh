#!/usr/bin/env bash
#
# Runs the linters and all tests, or with arguments just pytest:  tests/run.sh [ARGUMENTS OF pytest]
#
# The first call sets everything up (see setup.sh); PYTHON picks the interpreter.
set -euo pipefail

# shellcheck source=tests/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
setup_runtime
setup_tools
use_simulator

cd -- "$project"
if [[ $# -eq 0 ]]; then
  "$test_python" -m ruff check --quiet .
  "$test_python" -m mypy --no-error-summary inference.py assets/render.py tests/check_evidence.py
  "${test_python%/*}/shellcheck" tests/*.sh tests/cannsim/*.sh tests/measure/*.sh .ci/run
fi
export TEST_SIMULATOR=$simulator
# Three at a time on two cores: much of what the tests do is wait for a hold, a timeout or a signal.
exec "$test_python" -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile "$@"

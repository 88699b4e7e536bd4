#!/usr/bin/env bash
#
# Measures inference.py and plain Stable-Baselines3 side by side on the simulated NPU and prints a table in Markdown:
#   tests/measure/bench.sh [--quick]
#
# The first call sets everything up (see setup.sh); PYTHON picks the interpreter. Exit code 1: a target was missed.
set -euo pipefail

# shellcheck source=tests/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../setup.sh"
setup_runtime
use_simulator
exec "$python" "$project/tests/measure/bench.py" "$@"

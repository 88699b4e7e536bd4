#!/usr/bin/env bash
#
# Runs inference.py on the simulated NPU:  tests/simulate.sh [ARGUMENTS OF inference.py]
#
# Without --checkpoint it runs the stand-in checkpoint of tests/data. The first call sets everything up (see setup.sh),
# but --help and --version need nothing. PYTHON picks the interpreter, CANNSIM_* the behaviour of the simulator. The
# exit code is inference.py's.
set -euo pipefail

# shellcheck source=tests/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

program=$(realpath --relative-to=. -- "$project/inference.py")
for argument; do
  case $argument in
    -h | --help | --version)
      any_python
      exec "$python" "$program" "$@"
      ;;
  esac
done

setup_runtime
use_simulator

standin=$project/tests/data/standin-ppo-seals-CartPole-v0.zip
standin_sha256=9cf3e56aad9699674a80c839ceb54482552873f5d344f4af1aecd287a9642062

checkpoint=(--checkpoint "$(realpath --relative-to=. -- "$standin")" --sha256 "$standin_sha256")
for argument; do
  case $argument in
    --checkpoint | --checkpoint=*) checkpoint=() ;;
  esac
done
exec "$python" "$program" ${checkpoint[@]+"${checkpoint[@]}"} "$@"

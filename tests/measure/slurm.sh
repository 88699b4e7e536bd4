#!/usr/bin/env bash
#
# Runs an array of four shards on a real Slurm of one node, each on a simulated NPU of its own:  tests/measure/slurm.sh
#
# As root, on Debian or Ubuntu: Slurm and munge are installed with apt when they are missing, and stay. Everything else
# (configuration, key, sockets, logs, evidence) lives in a temporary directory, and each daemon that is started here is
# ended here; a Slurm that the machine has already is not touched.
#
# Exit code 0: four good runs of one checkpoint, complete, with the outputs of a single run. 1: not so.
set -euo pipefail

# shellcheck source=tests/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../setup.sh"

standin=$project/tests/data/standin-ppo-seals-CartPole-v0.zip
shards=4
rows=20003  # not a multiple of four
job_timeout=600

say() { printf 'slurm: %s\n' "$*" >&2; }

# What apt installs must not be started by it: policy-rc.d is how Debian lets one say so.
install_slurm() {
  local policy=/usr/sbin/policy-rc.d made=
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null &&
    command -v munged >/dev/null && return
  command -v apt-get >/dev/null || die 'Slurm is missing, and there is no apt-get to install it with'
  say 'installing slurmctld, slurmd, slurm-client and munge (once)'
  if [[ ! -e $policy ]]; then
    made=$policy
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  local output failed=
  output=$(
    exec 2>&1
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      slurmctld slurmd slurm-client munge
  ) || failed=1
  rm -f -- "$made"
  [[ -z $failed ]] || die 'apt-get could not install Slurm:' "$output"
}

daemons=()  # their PIDs, in the order in which they were started

# start NAME COMMAND...: in the foreground of its own session, so that a Ctrl-C reaches this script alone.
start() {
  local name=$1
  shift
  setsid "$@" >"$work/$name.out" 2>&1 </dev/null &
  daemons+=("$!")
}

end_all() {
  local i
  trap '' INT TERM HUP
  [[ -z ${job:-} ]] || timeout 20 scancel --quiet "$job" 2>/dev/null || true
  for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
    kill -TERM "${daemons[i]}" 2>/dev/null || continue
    timeout 20 tail -f /dev/null --pid="${daemons[i]}" || kill -KILL "${daemons[i]}" 2>/dev/null || true
    wait "${daemons[i]}" 2>/dev/null || true
  done
  rm -rf -- "$work"
}

fail() {
  say "$@"
  tail -n 15 "$work"/*.out "$work"/*.log >&2 || true
  exit 1
}

# wait_until SECONDS WHAT COMMAND...: until the command succeeds.
wait_until() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [[ $SECONDS -lt $deadline ]] || fail "$what"
    sleep 0.2
  done
}

node_is_idle() { [[ $(sinfo --noheader --format=%T) == idle ]]; }

job_has_ended() {
  local left
  left=$(squeue --noheader --job="$job") && [[ -z $left ]]
}

[[ $EUID -eq 0 ]] || die 'Slurm is started here as root: run this as root'
setup_runtime
use_simulator
install_slurm

work=$(mktemp -d "${TMPDIR:-/tmp}/slurm-array.XXXXXX")
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cd -- "$work"
host=$(hostname -s)
read -r port_of_controller port_of_node < <("$python" -c '
import socket
free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(server.getsockname()[1] for server in free))')

cat >slurm.conf <<END
ClusterName=simulated
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port_of_controller
SlurmdPort=$port_of_node
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=npu
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=$shards Gres=npu:$shards
PartitionName=npu Nodes=$host Default=YES MaxTime=30
END
export SLURM_CONF=$work/slurm.conf
mkdir state spool
(umask 077 && head -c 1024 /dev/urandom >munge.key)
chmod 755 "$work"

start munged munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --log-file="$work/munged.log" --seed-file="$work/munged.seed"
wait_until 30 'munged does not answer' munge --no-input --socket="$work/munge.socket"
start slurmctld slurmctld -D -f "$SLURM_CONF" -L "$work/slurmctld.log"
start slurmd slurmd -D -f "$SLURM_CONF" -L "$work/slurmd.log"
wait_until 60 'the node does not come up' node_is_idle

standin_sha256=$(sha256sum <"$standin" | cut -d ' ' -f 1)
run=("$python" "$project/inference.py" --checkpoint "$standin" --sha256 "$standin_sha256" --hold-seconds 0
  --observations rows.npy)
"$python" -c '
import sys, numpy
numpy.save("rows.npy", numpy.random.default_rng(0).normal(size=(int(sys.argv[1]), 4)).astype(numpy.float32))' "$rows"

# The array, as one would write it for a cluster whose Slurm counts the devices and does not say which one a task got.
cat >array.sh <<END
#!/bin/bash
#SBATCH --job-name=ppo --output=task-%a.txt --time=10
#SBATCH --array=0-$((shards - 1)) --ntasks=1 --cpus-per-task=1 --gres=npu:1
export ASCEND_RT_VISIBLE_DEVICES=\$SLURM_ARRAY_TASK_ID
exec $(printf '%q ' "${run[@]}") --shard "\$((SLURM_ARRAY_TASK_ID + 1))/$shards" --log-dir "shard-\$SLURM_ARRAY_TASK_ID"
END

say "$(sinfo --version), $(sinfo --noheader --format='partition %P, %D node, %c CPUs, %T')"
export CANNSIM_DEVICES=$shards
started=$SECONDS
job=$(sbatch --parsable array.sh)
say "sbatch array.sh: job $job, $rows rows in $shards tasks"
wait_until "$job_timeout" 'the job does not end' job_has_ended
say "ended after $((SECONDS - started)) s"
for ((task = 0; task < shards; task++)); do
  id=${job}_$task
  state=$(scontrol --oneliner show job "$id" | grep -oE ' (JobState|ExitCode|NodeList|TresPerNode)=\S+' | xargs)
  say "task $id: $state"
  [[ $state == *JobState=COMPLETED*ExitCode=0:0* ]] || fail "task $id: $(tail -n 3 "task-$task.txt")"
done
unset CANNSIM_DEVICES job

"${run[@]}" --log-dir single >single.out 2>&1 || fail 'the single run failed'
"$python" "$project/tests/check_evidence.py" shard-* --checkpoint "$standin" --observations rows.npy ||
  fail 'the evidence of the array is not what it should be'
"$python" - shard-* <<'END' || fail 'the joined outputs are not those of a single run'
import json, sys
import numpy

results = [json.load(open(f"{directory}/npu_result.json", encoding="utf-8")) for directory in sys.argv[1:]]
devices = [result["visible_devices"] for result in results]
parts = [numpy.load(f"{directory}/npu_outputs.npy") for directory in sys.argv[1:]]
single = numpy.load("single/npu_outputs.npy")
joined = numpy.concatenate(parts)
equal = joined.dtype == single.dtype and joined.tobytes() == single.tobytes()
print(f"devices {', '.join(devices)}; rows {' + '.join(str(len(part)) for part in parts)} = {len(joined)}")
print(f"joined outputs {'equal' if equal else 'DIFFER FROM'} those of a single run of {len(single)} rows, bit for bit")
sys.exit(not equal or len(set(devices)) != len(devices))
END
say 'good'

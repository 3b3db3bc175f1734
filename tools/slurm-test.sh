#!/usr/bin/env bash
# Runs examples/11-distributed under SLURM: two nodes, which are two slurmd of this machine, and nothing else of it. It
# requires that jobs that are signalled or preempted go on to the weights of one that is not. Needs root, the built
# libraries (make shim), and Debian's slurmctld, slurmd, slurm-client and munge. SLURM waits a while before it starts a job
# again.
#
# SLURM_TEST_PORT= is the first of three free ports (default: 46817).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "slurm-test: error: $*" >&2 && exit 1; }
((EUID == 0)) || fail "slurmd needs root"
for program in slurmctld slurmd srun munged; do
  command -v "$program" >/dev/null || fail "$program is missing: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
done
port=${SLURM_TEST_PORT:-46817} host=$(hostname -s) dir=$(mktemp -d)
export SLURM_CONF=$dir/slurm.conf OMP_NUM_THREADS=1
daemons=() limit=300 # seconds for each wait
cleanup() {
  scancel --user=root --signal=KILL 2>/dev/null || true
  kill "${daemons[@]}" 2>/dev/null || true
  wait
  rm -rf "$dir"
}
trap cleanup EXIT

# The ranks meet at the name of the first node, in the order of the alphabet. It is this machine's, which resolves.
go build -o "$dir/11-distributed" ./examples/11-distributed
TORCHSTREAM_LIBRARY=${TORCHSTREAM_LIBRARY:-$PWD/cshim/build/lib}
export TORCHSTREAM_LIBRARY
cp examples/data/photos-train.tgz "$dir/"
mkdir "$dir/state"
cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
MinJobAge=3600
NodeName=$host NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4
NodeName=$host-2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=lowest Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=10
END
head -c 1024 /dev/urandom >"$dir/munge.key"
chmod 600 "$dir/munge.key"
chmod 755 "$dir"
munged --foreground --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
  --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" 2>"$dir/munged.err" &
daemons+=($!)
until [[ -S $dir/munge.socket ]]; do kill -0 "${daemons[0]}" || fail "$(tail -n 3 "$dir/munged.err")"; sleep 0.1; done
slurmctld -D -f "$SLURM_CONF" 2>"$dir/slurmctld.log" &
daemons+=($!)
for node in "$host" "$host-2"; do
  slurmd -D -N "$node" -f "$SLURM_CONF" 2>"$dir/slurmd.$node.log" &
  daemons+=($!)
done
until [[ $(sinfo -h -o %T 2>/dev/null | sort -u) == idle ]]; do
  kill -0 "${daemons[@]}" || fail "$(tail -n 5 "$dir"/slurm*.log)"
  ((SECONDS < limit)) || fail "the nodes do not come: $(sinfo -N -l; tail -n 5 "$dir"/slurm*.log)"
  sleep 0.5
done
cd "$dir"
training=(./11-distributed -cpu -archive photos-train.tgz -epochs 40 -timeout 60s)

# Submits a job of three ranks to a partition, waits for its second epoch, and prints its number.
submit() {
  sbatch --parsable --partition="$2" --nodes=2 --ntasks=3 --ntasks-per-node=2 --gpus-per-node=0 --cpus-per-task=1 -o "$1.out" "$OLDPWD/examples/launch/slurm.sbatch" \
    "${training[@]}" -checkpoint "$1.pt" -save "$1.safetensors"
  local end=$((SECONDS + limit))
  until grep -q "epoch 2:" "$1.out" 2>/dev/null; do ((SECONDS < end)) || fail "$1 does not begin: $(cat "$1.out")"; sleep 0.1; done
}
# Waits for the end of a job, which must have gone on once.
require_end() {
  local end=$((SECONDS + limit))
  until [[ $(squeue -h -j "$2" -o %T 2>/dev/null) == "" ]]; do ((SECONDS < end)) || fail "$1 does not end: $(cat "$1.out")"; sleep 0.5; done
  scontrol show job "$2" | grep -q 'Requeue=1 Restarts=1' || fail "$1 was not started again: $(cat "$1.out")"
  grep -q "goes on in epoch" "$1.out" || fail "$1 began anew: $(cat "$1.out")"
  cmp whole.safetensors "$1.safetensors" || fail "$1 has other weights: $(cat "$1.out")"
  echo "slurm-test: $1: $(grep "goes on" "$1.out"), to the same weights"
}

srun --nodes=1 --ntasks=2 "${training[@]}" -epochs 1
srun --nodes=2 --ntasks=3 "${training[@]}" -save whole.safetensors | tail -n 1
job=$(submit signalled low)
scancel --signal=TERM "$job"
require_end signalled "$job"
for partition in low lowest; do
  job=$(submit "preempted-$partition" "$partition")
  srun --quiet --partition=high --nodes=2 --ntasks=2 --exclusive true
  require_end "preempted-$partition" "$job"
done
echo "slurm-test: $(sinfo --version): passed in $SECONDS s"

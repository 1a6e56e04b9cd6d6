# shellcheck shell=bash
# Sourced by train_srun.sbatch and train_torchrun.sbatch, from the root of the checkout. Sets:
#
#   PYTHON         the interpreter: $PYTHON, that of an active environment, or that of .venv
#   MASTER_ADDR    the job's first node; MASTER_PORT: a port computed from the job's number
#   cluster        NAME of the argument `cluster=NAME`, or empty
#   variables      NAME=VALUE of the arguments `cluster.env.NAME=VALUE`, without those that are set
#   restarting     the overrides that let a job continue after Slurm has restarted it
#
# and defines preflight and train. Every failure prints one message and exits with code 2.

# With these a rank that gets the signal saves a checkpoint and asks for a restart. They come before
# the user's arguments, which may override them.
# shellcheck disable=SC2034 # the script that sources this uses it
restarting=(training.save_signal=SIGUSR1 cluster.requeue=true resume=auto)

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

# setup ARGUMENT...: takes the arguments of the training; sets the variables listed above.
setup() {
  local argument name value
  if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    fail "this is not a Slurm job" "sbatch scripts/train_srun.sbatch ARGUMENT..." "no SLURM_JOB_NODELIST" \
      "submit it with sbatch; without Slurm: scripts/train.py"
  fi
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/python ]; then
      PYTHON=$PWD/.venv/bin/python
    fi
  fi
  if ! "$PYTHON" -c 'import hydra, torch' >/dev/null 2>&1; then
    fail "the interpreter does not fit" "Python with torch and hydra-core" "$PYTHON" \
      "activate the environment before sbatch, or run PYTHON=.../bin/python sbatch ..."
  fi
  # sed, not head: it reads to the end, so that a long list does not end scontrol by SIGPIPE.
  MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
  # Jobs that share a node must not share a port.
  MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  export PYTHON MASTER_ADDR MASTER_PORT PYTHONUNBUFFERED=1
  # After `sbatch --export=NONE` srun would not pass this script's variables on to the ranks.
  export SLURM_EXPORT_ENV=ALL
  # From Slurm 22.05 on srun may ignore the --cpus-per-task of sbatch.
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  cluster="" variables=()
  for argument in "$@"; do
    case $argument in
      cluster=*) cluster=${argument#cluster=} ;;
      cluster.env.*=* | +cluster.env.*=* | ++cluster.env.*=*)
        name=${argument#*cluster.env.} value=${argument#*=}
        name=${name%%=*} value=${value#[\'\"]} # Hydra takes quotes around a value
        if [ -z "${!name+set}" ]; then variables+=("$name=${value%[\'\"]}"); fi
        ;;
    esac
  done
  echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_JOB_NODELIST," \
    "rendezvous at $MASTER_ADDR:$MASTER_PORT"
}

# train COMMAND...: runs the training and exits with its code. If it failed because a node is gone,
# the job is requeued, unless it has restarted MEGATRON_SPARSE_RESTARTS times (3), for whatever
# reason. Slurm itself requeues only if the node that runs this script fails; if another one fails,
# the remaining ranks end the job before Slurm acts.
train() {
  local code=0 gone job=$SLURM_JOB_ID
  # An array's last task has the array's number, which stands for all of its tasks.
  if [ "${SLURM_ARRAY_JOB_ID:-}" = "$job" ]; then job+=_$SLURM_ARRAY_TASK_ID; fi
  "$@" || code=$?
  # 2 is a mistake of the user, which a restart would repeat.
  if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then exit "$code"; fi
  # A rank that has asked for the restart itself is killed by it; that is not a failure.
  if [ "$(squeue --noheader --jobs="$job" --format=%T)" != RUNNING ]; then exit "$code"; fi
  gone=$(gone_nodes)
  if [ -z "$gone" ]; then exit "$code"; fi
  echo "error: training ended with code $code; these nodes no longer answer: $gone" >&2
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MEGATRON_SPARSE_RESTARTS:-3}" ]; then
    # The requeue ends this script too.
    scontrol requeue "$job" && sleep 120
  fi
  exit "$code"
}

# Prints in one line the job's nodes on which srun cannot start a process.
gone_nodes() {
  local host gone=()
  local -A probes=()
  for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    timeout 30 srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$host" true \
      >/dev/null 2>&1 &
    probes[$host]=$!
  done
  for host in "${!probes[@]}"; do
    wait "${probes[$host]}" || gone+=("$host")
  done
  echo "${gone[*]}"
}

# preflight COMMAND...: measures the job's links, before it spends hours; ends it if a rank does not
# come. COMMAND starts the arguments that follow it on every rank, in the environment that the
# training will have. MEGATRON_SPARSE_PREFLIGHT=off skips this.
preflight() {
  local mode=${MEGATRON_SPARSE_PREFLIGHT:-on}
  local arguments=(calibrate --quick --force --output "megatron-sparse-$SLURM_JOB_ID.yaml")
  case $mode in
    off) return ;;
    on) ;;
    *) fail "MEGATRON_SPARSE_PREFLIGHT is unknown" "on | off" "$mode" "unset it" ;;
  esac
  if [ -n "$cluster" ]; then arguments+=(--env "$cluster"); fi
  env "${variables[@]}" "$@" -m megatron_sparse.cli.main "${arguments[@]}" || {
    local code=$?
    echo "error: the pre-flight check failed with code $code; the lines above say why;" \
      "sbatch --exclude=NODE avoids it" >&2
    exit "$code"
  }
}

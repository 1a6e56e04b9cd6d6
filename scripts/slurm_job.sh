# shellcheck shell=bash
# Sourced by train_srun.sbatch and train_torchrun.sbatch, from the root of the checkout. Sets:
#
#   PYTHON         the interpreter: $PYTHON, that of an active environment, or that of .venv
#   MASTER_ADDR    the job's first node, MASTER_PORT a port that follows from the job's number
#   cluster        what `cluster=NAME` among the arguments says, or nothing
#   restarting     the overrides that let a job go on after Slurm has started it again
#
# and defines preflight and train. Every failure is one message, exit code 2.

# Let a rank that is told to stop save a checkpoint and be started again. They stand before the
# user's own arguments, which may say otherwise.
# shellcheck disable=SC2034 # the script that sources this uses it
restarting=(training.save_signal=SIGUSR1 cluster.requeue=true resume=auto)

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

# setup ARGUMENT...: those of the training.
setup() {
  local argument
  if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    fail "this is no job of Slurm" "sbatch scripts/train_srun.sbatch ARGUMENT..." "no SLURM_JOB_NODELIST" \
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
      "activate the environment before sbatch, or say PYTHON=.../bin/python sbatch ..."
  fi
  MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
  # Jobs that share a node must not share a port.
  MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  export PYTHON MASTER_ADDR MASTER_PORT PYTHONUNBUFFERED=1
  cluster=""
  for argument in "$@"; do
    case $argument in cluster=*) cluster=${argument#cluster=} ;; esac
  done
  echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_JOB_NODELIST," \
    "meeting at $MASTER_ADDR:$MASTER_PORT"
}

# train COMMAND...: the training's exit code is the script's. Where it failed because a node is gone,
# Slurm starts the job again, up to MEGATRON_SPARSE_RESTARTS times (3): Slurm itself does so only for
# the node that runs this script, and for the others the ranks that are left are faster.
train() {
  local code=0 gone
  "$@" || code=$?
  # 2: the user's mistake, which a restart does not mend.
  if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then exit "$code"; fi
  # A rank that has asked for the restart itself is killed by it, which is no failure.
  if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ]; then exit "$code"; fi
  gone=$(gone_nodes)
  if [ -z "$gone" ]; then exit "$code"; fi
  echo "error: training ended with code $code; these nodes no longer answer: $gone" >&2
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MEGATRON_SPARSE_RESTARTS:-3}" ]; then
    # Slurm ends this script, too.
    scontrol requeue "$SLURM_JOB_ID" && sleep 120
  fi
  exit "$code"
}

# The job's nodes on which nothing can be started, in one line.
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

# preflight RANKS COMMAND...: whether every rank sees every other, before hours of a job are spent.
# COMMAND starts what follows it on every rank. MEGATRON_SPARSE_PREFLIGHT=off leaves it out; with
# `strict` a slow link or a wrong clock ends the job, too.
preflight() {
  local mode=${MEGATRON_SPARSE_PREFLIGHT:-on} arguments=(doctor --distributed)
  case $mode in
    off) return ;;
    on) ;;
    strict) arguments+=(--strict) ;;
    *)
      fail "MEGATRON_SPARSE_PREFLIGHT is unknown" "on | strict | off" "$mode" "unset it"
      ;;
  esac
  if [ -n "$cluster" ]; then arguments+=(--cluster "$cluster"); fi
  "$@" -m megatron_sparse.cli.main "${arguments[@]}" || {
    local code=$?
    echo "error: the pre-flight check failed with code $code; the lines above name the node, and" \
      "sbatch --exclude=NODE goes around it" >&2
    exit "$code"
  }
}

#!/usr/bin/env bash
# A real Slurm on this machine, for tests and experiments: munged, slurmctld and several slurmd on
# the loopback. It needs no systemd and does not touch the files of an installed Slurm.
#
#   scripts/slurm_bed.sh up DIR [NODES]   starts it (2 nodes n0, n1, ...); its state is in DIR
#   scripts/slurm_bed.sh hold DIR [NODES] the same; stops it when standard input ends
#   scripts/slurm_bed.sh status DIR       lists the nodes and their state
#   scripts/slurm_bed.sh fail DIR NODE    kills a node and its processes, like a power cut
#   scripts/slurm_bed.sh start DIR NODE   starts a failed node again
#   scripts/slurm_bed.sh down DIR         stops everything and removes DIR
#
# `. DIR/env.sh` points sbatch, srun and squeue of the shell at it. Each node has its own host name
# and 4 CPUs, however many this machine has. DIR must be new or empty, and its path short, because
# it holds a socket (108 bytes at most).
#
# Each daemon is the first process of a process namespace: when it ends, the kernel ends every
# process in it, including those of the jobs. `down` ends only the processes that `up` has started,
# by process id. There is no accounting daemon, so `sacct`, which submitit polls, cannot work:
# env.sh puts a substitute on PATH that asks scontrol.
#
# Needs root, and Debian's slurm-wlm and munge (scripts/system_packages.sh installs them).
set -euo pipefail

READY_S=60 STOP_S=10 CPUS=4 MEMORY_MB=4000
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

# daemon NAME COMMAND...: starts COMMAND in namespaces of its own, with NAME as host name.
daemon() {
  local name=$1
  shift
  # shellcheck disable=SC2016 # expanded inside
  setsid unshare --mount --uts --pid --fork --kill-child=KILL --mount-proc -- bash -euc '
    echo "$1" >/proc/sys/kernel/hostname
    mount --bind "$2" /etc/hosts
    shift 2
    exec "$@"' _ "$name" "$dir/hosts" "$@" </dev/null >>"$dir/log/$name.out" 2>&1 &
  # Save the start time too: by the time of `down` the process id may have been reused.
  echo "$! $(started_at $!)" >"$dir/pids/$name"
}

# started_at PID: prints its start time, in clock ticks since boot.
started_at() {
  awk '{sub(/.*\) /, ""); print $20}' "/proc/$1/stat" 2>/dev/null || true
}

# stop NAME: kills a daemon and, with its process namespace, every process that it started.
stop() {
  local pid ticks tries=$((STOP_S * 50))
  read -r pid ticks <"$dir/pids/$1"
  if [ -n "$ticks" ] && [ "$(started_at "$pid")" = "$ticks" ]; then
    kill -KILL "$pid" || true # it may have ended already
    while [ "$(started_at "$pid")" = "$ticks" ] && [ $tries -gt 0 ]; do
      tries=$((tries - 1))
      sleep 0.02
    done
  fi
  rm -f "$dir/pids/$1"
}

# Sets base to the first of NODES + 1 consecutive free ports.
find_ports() {
  local try port
  for try in {1..50}; do
    base=$((20000 + (RANDOM + try) % 20000))
    for ((port = base; port <= base + nodes; port++)); do
      if (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
    done
    return
  done
  fail "no ports are free" "$((nodes + 1)) ports in a row above 20000" "none in 50 tries" \
    "end the programs that listen there"
}

write_files() {
  local node
  mkdir -p "$dir"/{log,pids,state,munge,bin}
  chmod 755 "$dir" "$dir/munge"
  head -c 1024 /dev/urandom >"$dir/munge.key"
  chmod 600 "$dir/munge.key"
  cat /etc/hosts >"$dir/hosts"
  for ((node = 0; node < nodes; node++)); do
    echo "127.0.0.1 n$node" >>"$dir/hosts"
  done
  find_ports
  {
    # A requeued job waits for cred_expire and KillWait; a dead node is found after SlurmdTimeout.
    # The scheduler's intervals suit jobs that come one by one. Nothing needs cgroups or an
    # accounting daemon.
    cat <<CONF
ClusterName=bed
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$base
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmdTimeout=10
TCPTimeout=10
MessageTimeout=30
InactiveLimit=0
CONF
    for ((node = 0; node < nodes; node++)); do
      echo "NodeName=n$node NodeHostname=n$node NodeAddr=127.0.0.1 Port=$((base + 1 + node))" \
        "CPUs=$CPUS RealMemory=$MEMORY_MB State=UNKNOWN"
    done
    echo "PartitionName=bed Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
  } >"$dir/slurm.conf"
  ln -s "$HERE/slurm_sacct.py" "$dir/bin/sacct"
  cat >"$dir/env.sh" <<ENV
export SLURM_CONF='$dir/slurm.conf' PATH='$dir/bin':"\$PATH"
ENV
}

# wait_until COMMAND...: until it succeeds; after READY_S seconds prints the logs' ends, returns 1
wait_until() {
  local tries=$((READY_S * 10))
  until "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    if [ $tries -eq 0 ]; then
      tail -n 5 "$dir"/log/* >&2 || true
      return 1
    fi
    sleep 0.1
  done
}

idle_nodes() {
  [ "$(sinfo --noheader --Node --states=idle --format=%N | sort -u | wc -l)" -ge "$1" ]
}

start_node() {
  daemon "$1" slurmd -D -N "$1" -c
}

up() {
  local node
  if [ "$(id -u)" -ne 0 ]; then
    fail "only root can start the Slurm bed" "root" "$(id -un)" "run it as root"
  fi
  for tool in munged slurmctld slurmd sinfo unshare setsid; do
    if ! command -v "$tool" >/dev/null; then
      fail "the Slurm bed needs a tool that is missing" "munged, slurmctld, slurmd, unshare" "no $tool" \
        "bash scripts/system_packages.sh"
    fi
  done
  if [ -e "$dir" ] && [ -n "$(ls -A "$dir")" ]; then
    fail "the bed's folder is in use" "a new or an empty folder" "$dir" \
      "give another one, or end the bed in it: scripts/slurm_bed.sh down $dir"
  fi
  if [ ${#dir} -gt 90 ]; then
    fail "the bed's path is too long for a socket" "at most 90 bytes" "$dir" "give a shorter one"
  fi
  write_files
  trap 'if [ $? -ne 0 ]; then down; fi' EXIT
  # --force: a parent folder that everyone can write to causes a warning, not a refusal.
  daemon munged munged --foreground --force --socket="$dir/munge/socket" \
    --key-file="$dir/munge.key" --log-file="$dir/log/munged.log" \
    --pid-file="$dir/munged.pid" --seed-file="$dir/munge.seed"
  wait_until test -S "$dir/munge/socket" || not_ready munged
  # slurmctld must run under the host name that its configuration states.
  daemon "$(hostname)" slurmctld -D -c
  for ((node = 0; node < nodes; node++)); do
    start_node "n$node"
  done
  wait_until idle_nodes "$nodes" || not_ready "$nodes idle nodes"
  echo "Slurm is up: $nodes nodes, . $dir/env.sh"
}

not_ready() {
  fail "the Slurm bed did not start" "$1 within $READY_S s" "the lines above" \
    "try again when the machine is less loaded"
}

down() {
  local file
  if [ ! -d "$dir/pids" ]; then
    fail "there is no bed to end" "a folder that \`up\` has made" "$dir" \
      "give the DIR that \`up\` was called with"
  fi
  for file in "$dir"/pids/*; do
    if [ -e "$file" ]; then stop "$(basename "$file")"; fi
  done
  rm -rf "$dir"
}

case ${1:-} in
  --help | -h)
    usage
    exit 0
    ;;
  up | hold | down | status | fail | start) ;;
  *) fail "the action is unknown" "up, hold, status, fail, start or down" "${1:-nothing}" "see --help" ;;
esac
[ -n "${2:-}" ] || fail "the bed has no folder" "scripts/slurm_bed.sh $1 DIR" "nothing" "see --help"
dir=$(realpath -m "$2") nodes=2 base=0
# Daemons are in sbin, which is not on every PATH.
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$dir/slurm.conf
case $1 in
  up | hold)
    nodes=${3:-2}
    if ! [[ $nodes =~ ^[1-9][0-9]?$ ]]; then
      fail "NODES is out of range" "1 to 99" "$nodes" "give a whole number"
    fi
    up
    if [ "$1" = hold ]; then
      # The kernel closes standard input however the process that holds its other end ends.
      # A second signal must not end it half-way.
      trap 'trap "" HUP INT TERM; down' EXIT
      cat >/dev/null
    fi
    ;;
  down) down ;;
  status) sinfo --Node --long ;;
  fail | start)
    if [ ! -e "$dir/spool.${3:-}" ]; then
      fail "the node is unknown" "a node of the bed in $dir" "${3:-nothing}" \
        "scripts/slurm_bed.sh status $dir"
    fi
    if [ "$1" = start ]; then start_node "$3"; else stop "$3"; fi
    ;;
esac

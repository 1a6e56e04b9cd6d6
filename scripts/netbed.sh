#!/usr/bin/env bash
# A small cluster on this machine: runs a command once for each rank, on hosts with slow links.
#
#   scripts/netbed.sh [--ranks N] [--mbit R] [--nodes M] [--delay-ms D] [--sites 2] [--logs DIR] \
#                     [--grace S] [--timeout S] -- COMMAND...
#
#   --ranks N     processes (4)
#   --mbit R      rate of each host's link in Mbit/s, in each direction (1000); 0: unlimited
#   --nodes M     hosts; ranks are distributed evenly and in order (default: one host for each rank)
#   --delay-ms D  round trip between two hosts (0)
#   --sites 2     two sites of equally many hosts, in order: rate and delay are those of the one
#                 link between the sites, and links inside a site are unlimited
#   --logs DIR    rank R > 0 writes to DIR/rankR.log; by default its lines are prefixed with [R]
#   --grace S     when a rank has failed, seconds until the others are killed (5)
#   --timeout S   seconds that the whole run may take (3600)
#
# Each host is a network namespace with its own host name (netbed-0, ...) and address (10.77.0.1,
# ...) on one bridge. A token bucket limits its sends, another one on the bridge its receives; 94 to
# 96 % of the rate is payload. Ranks of one host use its loopback, which is not limited. Every rank
# finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT and
# GLOO_SOCKET_IFNAME in its environment; NETBED_MBIT is the rate, NETBED_LINKS describes rate, delay
# and sites; OMP_NUM_THREADS and PYTHONUNBUFFERED are 1 unless they are set. This machine's cores do
# the work of all ranks and links: keep N * R below about 12 Gbit/s, and run no other programs.
#
# Exits with the code of the first rank that failed, 124 after the timeout, 128 + n after signal n,
# 2 if the test bed cannot be set up. Needs root, and ip and tc of iproute2.
#
# Everything is in namespaces that only this run's processes use, a process namespace among them. So
# however this script ends, even by SIGKILL, the kernel ends every process of the run and removes
# its links and hosts. Nothing has a name outside of the namespaces, so several runs do not collide.
set -euo pipefail

DEVICE=e0 NETWORK=10.77.0 PORT=29500
# A smaller bucket splits TCP's packets, a shorter queue drops them: either halves the rate.
BURST_KB=128 QUEUE_KB=4096
# Where several connections share a link, or fill one with a delay, they must not drop either.
SHARED_QUEUE_KB=65536
SETUP_S=10 DRAIN_S=2
ranks=4 mbit=1000 delay_ms=0 sites=1 nodes="" logs="" grace=5 timeout=3600
command=() hosts=() prefixers=() starters=()

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

# whole_number OPTION VALUE LOWEST HIGHEST
whole_number() {
  if ! [[ $2 =~ ^[0-9]{1,8}$ ]] || [ "$2" -lt "$3" ] || [ "$2" -gt "$4" ]; then
    fail "$1 is out of range" "a whole number from $3 to $4" "${2:-nothing}" "see --help"
  fi
}

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
      --)
        shift
        command=("$@")
        break
        ;;
      --ranks) whole_number "$1" "${2:-}" 1 250 && ranks=$2 ;;
      --mbit) whole_number "$1" "${2:-}" 0 100000 && mbit=$2 ;;
      --delay-ms) whole_number "$1" "${2:-}" 0 2000 && delay_ms=$2 ;;
      --sites) whole_number "$1" "${2:-}" 1 2 && sites=$2 ;;
      --nodes) whole_number "$1" "${2:-}" 1 250 && nodes=$2 ;;
      --grace) whole_number "$1" "${2:-}" 0 86400 && grace=$2 ;;
      --timeout) whole_number "$1" "${2:-}" 1 31536000 && timeout=$2 ;;
      --logs)
        [ -n "${2:-}" ] || fail "--logs has no value" "a folder" "nothing" "see --help"
        logs=$2
        ;;
      *) fail "an option is unknown" "options of --help, -- and the command" "$1" "see --help" ;;
    esac
    shift 2
  done
  if [ ${#command[@]} -eq 0 ]; then
    fail "there is no command" "scripts/netbed.sh OPTIONS -- COMMAND" "nothing after --" \
      "write -- and the command at the end"
  fi
  nodes=${nodes:-$ranks}
  if [ "$nodes" -gt "$ranks" ]; then
    fail "there are more nodes than ranks" "--nodes up to $ranks" "$nodes" "add ranks"
  fi
  if [ $((nodes % sites)) -ne 0 ]; then
    fail "the hosts cannot be divided among the sites" "an even number of hosts" "$nodes" \
      "change --nodes or --ranks"
  fi
}

# Runs a command that must succeed; its failure ends the script with an error that quotes it.
must() {
  local answer
  if ! answer=$("$@" 2>&1); then
    fail "the test bed cannot be set up" "success of: $*" "${answer:-a failure without output}" \
      "use a machine (or a container with --privileged) whose kernel has veth, bridge and tbf"
  fi
}

outside() {
  if [ "$(id -u)" -ne 0 ]; then
    fail "only root can make network namespaces" "root" "$(id -un)" "run it as root"
  fi
  local tool
  for tool in ip:iproute2 tc:iproute2 mount:mount unshare:util-linux nsenter:util-linux \
    setpriv:util-linux; do
    if ! command -v "${tool%:*}" >/dev/null; then
      fail "the test bed needs a tool that is missing" "ip, tc, mount, unshare, nsenter and setpriv on PATH" \
        "no ${tool%:*}" "install the package ${tool#*:}"
    fi
  done
  must unshare --net --mount --uts --pid --fork --mount-proc true
  if [ -n "$logs" ]; then
    must mkdir -p "$logs"
  fi
  # When this script ends, unshare is killed; with it the first process of the process namespace;
  # and with that all other processes of the namespace.
  NETBED_INSIDE=1 setpriv --pdeathsig KILL \
    unshare --net --mount --pid --fork --kill-child=KILL --mount-proc -- \
    bash "${BASH_SOURCE[0]}" "$@" </dev/null &
  local bed=$! signal code=0
  for signal in HUP:129 INT:130 TERM:143; do
    # shellcheck disable=SC2064 # expanded now: it is this run's
    trap "{ kill -KILL $bed; wait $bed; } 2>/dev/null || true; exit ${signal#*:}" "${signal%:*}"
  done
  wait "$bed" || code=$?
  exit "$code"
}

# cable A B: connects two new devices, unless netbed_delay.py has.
cable() {
  ip link show "$1" >/dev/null 2>&1 || must ip link add "$1" type veth peer name "$2"
}

# slow DEVICE [COMMAND...]: limits what the device sends; the command runs tc where the device is.
slow() {
  local burst=$((mbit * 1000 / 8 / 1024)) queue=$QUEUE_KB # 1 ms
  if [ "$delay_ms" -gt 0 ] || [ "$sites" -gt 1 ]; then
    queue=$SHARED_QUEUE_KB
  fi
  if [ "$mbit" -gt 0 ]; then
    must "${@:2}" tc qdisc add dev "$1" root tbf rate "${mbit}mbit" \
      burst "$((burst > BURST_KB ? burst : BURST_KB))kb" limit "${queue}kb"
  fi
}

# Makes the sites' bridges, the link between them, and the ends of all links with a delay.
make_sites() {
  local site node ready answer="" devices=(t0 t1) one_way_us=$((delay_ms * 500))
  if [ "$sites" -eq 1 ]; then
    devices=() one_way_us=$((delay_ms * 250)) # there and back, two hosts' links each time
    for ((node = 0; node < nodes; node++)); do
      devices+=("p$node" "h$node")
    done
  fi
  if [ "$delay_ms" -gt 0 ]; then
    exec {ready}< <(exec python3 "${BASH_SOURCE[0]%.sh}_delay.py" "$one_way_us" "${devices[@]}" 2>&1)
    read -r -t "$SETUP_S" -u "$ready" answer || true
    if [ "$answer" != ready ]; then
      fail "links with a delay cannot be made" "python3 and /dev/net/tun" \
        "$answer $(timeout 1 cat <&"$ready")" "leave out --delay-ms, or load the module tun"
    fi
  fi
  for ((site = 0; site < sites; site++)); do
    must ip link add "br$site" type bridge stp_state 0 forward_delay 0
    must ip link set "br$site" up
  done
  if [ "$sites" -eq 2 ]; then
    cable t0 t1
    for site in 0 1; do
      must ip link set "t$site" master "br$site" up
      slow "t$site"
    done
  fi
}

# Makes the hosts. A host is a process that keeps its namespaces alive; `hosts` holds the process
# ids.
make_hosts() {
  local node tries names host=()
  # Set the congestion control, for this machine may use another one (bbr fills a token bucket less
  # well), and let no connection reuse metrics of an earlier one. With a delay, windows of twice a
  # link's content of 1 Gbit/s and 200 ms, kept between iterations.
  local host_setup="
    echo netbed-\$0 >/proc/sys/kernel/hostname
    ip link set lo up
    ip address add \$1/24 dev $DEVICE
    ip link set $DEVICE up
    echo reno >/proc/sys/net/ipv4/tcp_congestion_control
    echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save
    if [ $delay_ms -gt 0 ]; then
      echo 4096 131072 67108864 | tee /proc/sys/net/ipv4/tcp_rmem >/proc/sys/net/ipv4/tcp_wmem
      echo 0 >/proc/sys/net/ipv4/tcp_slow_start_after_idle
    fi"
  names=$(mktemp)
  cat /etc/hosts >"$names"
  for ((node = 0; node < nodes; node++)); do
    # Servers on IPv6 sockets, such as torch's store, look up the mapped address.
    printf '%s netbed-%s\n' "$NETWORK.$((node + 1))" "$node" "::ffff:$NETWORK.$((node + 1))" "$node" \
      >>"$names"
    unshare --net --uts -- sleep infinity &
    hosts[node]=$!
  done
  must mount --bind "$names" /etc/hosts
  rm "$names" # the mount keeps the content
  for ((node = 0; node < nodes; node++)); do
    tries=$((SETUP_S * 50))
    while [ "/proc/${hosts[node]}/ns/uts" -ef /proc/self/ns/uts ]; do
      tries=$((tries - 1))
      if [ $tries -eq 0 ]; then
        fail "the test bed cannot be set up" "host $node within $SETUP_S s" "nothing yet" \
          "try again when the machine is less loaded"
      fi
      sleep 0.02
    done
    cable "p$node" "h$node"
    must ip link set "h$node" netns "${hosts[node]}" name "$DEVICE"
    must ip link set "p$node" master "br$((node * sites / nodes))" up
    host=(nsenter --target "${hosts[node]}" --net --uts --)
    must "${host[@]}" bash -euc "$host_setup" "$node" "$NETWORK.$((node + 1))"
    if [ "$sites" -eq 1 ]; then
      slow "p$node"
      slow "$DEVICE" "${host[@]}"
    fi
  done
}

# start_rank RANK: starts it in the background; when it ends it writes "RANK CODE" to `ends`.
start_rank() {
  local rank=$1 node=$(($1 * nodes / ranks)) first last code=0 out=1 err=$terminal
  # The first rank of this host, and of the next one.
  first=$(((node * ranks + nodes - 1) / nodes))
  last=$((((node + 1) * ranks + nodes - 1) / nodes))
  if [ "$rank" -gt 0 ]; then
    if [ -n "$logs" ]; then
      exec {out}>"$logs/rank$rank.log"
    else
      exec {out}> >(exec sed -u "s/^/[$rank] /" >&2)
      prefixers+=($!)
    fi
    err=$out
  fi
  (
    RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$((rank - first)) LOCAL_WORLD_SIZE=$((last - first)) \
      NODE_RANK=$node nsenter --target "${hosts[node]}" --net --uts -- \
      "${command[@]}" 1>&"$out" 2>&"$err" || code=$?
    echo "$rank $code" >&"$ends"
  ) 2>/dev/null & # hides the shell's own message about a process that a signal killed
  starters+=($!)
  if [ "$rank" -gt 0 ]; then
    exec {out}>&-
  fi
}

# report RANK CODE
report() {
  printf 'netbed: rank %s ended with code %s' "$1" "$2" >&2
  if [ "$2" -gt 128 ]; then
    printf ' (signal %s)' $(($2 - 128)) >&2
  fi
  echo >&2
  if [ "$1" -gt 0 ] && [ -n "$logs" ]; then
    printf 'the end of %s:\n' "$logs/rank$1.log" >&2
    tail -n 20 "$logs/rank$1.log" >&2
  fi
}

# Kills every process of the run except the prefixers, which get a moment to write their last lines.
end_ranks() {
  local entry process kept=" $$ ${prefixers[*]} " tries=$((DRAIN_S * 50))
  for entry in /proc/[0-9]*; do
    process=${entry#/proc/}
    if [[ $kept != *" $process "* ]]; then
      kill -KILL "$process" || true # it may have ended already
    fi
  done
  for process in "${prefixers[@]}"; do
    while [ -e "/proc/$process" ] && [ $tries -gt 0 ]; do
      tries=$((tries - 1))
      sleep 0.02
    done
  done
}

inside() {
  unset NETBED_INSIDE
  make_sites
  make_hosts
  export MASTER_ADDR=$NETWORK.1 MASTER_PORT=$PORT GLOO_SOCKET_IFNAME=$DEVICE NETBED_MBIT=$mbit
  export NETBED_LINKS="$mbit Mbit/s, $delay_ms ms, $sites sites"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
  # A pipe without a name. (`wait -n` would be simpler, but misses a job that ends between two
  # calls.)
  exec {terminal}>&2 {ends}<> <(:)
  local rank code result=0 left=$ranks deadline=$((SECONDS + timeout))
  for ((rank = 0; rank < ranks; rank++)); do
    start_rank "$rank"
  done
  while [ "$left" -gt 0 ]; do
    # At least 1 second: `read -t 0` does not read a line.
    if ! read -r -t $((deadline > SECONDS ? deadline - SECONDS : 1)) -u "$ends" rank code; then
      echo "netbed: $left of $ranks ranks did not end in time and are killed" >&2
      result=$((result > 0 ? result : 124))
      break
    fi
    left=$((left - 1))
    if [ "$code" -ne 0 ] && [ "$result" -eq 0 ]; then
      result=$code
      report "$rank" "$code"
      deadline=$((SECONDS + grace))
    fi
  done
  # Waited for, they count as this process's children: who started it sees their processor time.
  {
    end_ranks
    wait "${starters[@]}"
  } 2>/dev/null || true
  exit "$result"
}

parse "$@"
if [ -n "${NETBED_INSIDE:-}" ]; then
  inside
else
  outside "$@"
fi

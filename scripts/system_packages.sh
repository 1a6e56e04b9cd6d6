#!/usr/bin/env bash
# Installs missing Debian packages that some tests need. Called by test.sh.
#
#   bash scripts/system_packages.sh [LOG]
#
#   slurm-wlm, munge   tests/integration/test_slurm.py, which starts a Slurm of its own
#   iproute2           scripts/netbed.sh, the network test bed
#   chromium           the tests that render a report's page
#
# Installs as root, with apt. Without root or apt, or if apt fails, it prints the packages that are
# missing. It always exits with 0: a test that lacks a tool skips, with the reason.
set -euo pipefail

# TOOL:PACKAGE. A package counts as missing if its tool is missing.
TOOLS=(slurmctld:slurm-wlm munged:munge ip:iproute2 tc:iproute2 chromium:chromium)
INSTALL_S=300
log=${1:-/dev/null}

missing=()
for tool in "${TOOLS[@]}"; do
  # Daemons are in sbin, which is not on every PATH.
  if ! PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null; then
    missing+=("${tool#*:}")
  fi
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

left_out() {
  echo "system packages: ${missing[*]} not installed ($1); the tests that need them skip"
  exit 0
}

[ "$(id -u)" -eq 0 ] || left_out "not root"
command -v apt-get >/dev/null || left_out "no apt-get on this system"
echo "system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
{
  timeout "$INSTALL_S" apt-get update -q &&
    timeout "$INSTALL_S" apt-get install -y -q --no-install-recommends \
      -o DPkg::Lock::Timeout=120 "${missing[@]}"
} >>"$log" 2>&1 </dev/null || left_out "apt-get failed, see $log"

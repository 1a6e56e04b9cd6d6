#!/usr/bin/env bash
# Installs the wheel as a user does, in a fresh environment outside of the checkout, with the newest
# torch and megatron-core that pip's index has. Then it asks the doctor, trains ten iterations on two
# CPU ranks, and resumes to the fourteenth.
#
#   bash scripts/wheel_check.sh [FOLDER]
#
# FOLDER must not exist, is made, and stays; without it a temporary folder is removed at the end. It
# takes 6 GB and ten minutes. Exit codes: 0 when all worked, 2 when pip could not install, else that
# of the step that failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=env.sh
. scripts/env.sh

if [ $# -gt 0 ]; then
  if [ -e "$1" ]; then
    fail "the folder exists" "a new folder" "$1" "give another path, or remove it"
  fi
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
log=$folder/install.log

TRIED=""
find_base_python || fail "no Python that fits was found" "Python >= 3.12 with venv and pip" \
  "${TRIED:-no Python at all}" "install Python 3.12 or newer"
say "environment: $folder/venv, made with $BASE_PYTHON"
"$BASE_PYTHON" -m venv "$folder/venv"
PYTHON=$folder/venv/bin/python
# Neither a checkout on PYTHONPATH nor an active environment may lend what the wheel lacks.
unset PYTHONPATH VIRTUAL_ENV
export PATH="$folder/venv/bin:$PATH"

# The build uses torch's headers. It writes into its source, hence the copy.
install "installing torch and the build tools (up to 5 GB; some minutes)" "$log" torch setuptools wheel
mkdir "$folder/source"
git ls-files -z --cached --others --exclude-standard |
  tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory "$folder/source"
logged "building the wheel" "$log" "$PYTHON" -m pip wheel --no-deps --no-build-isolation \
  --wheel-dir "$folder" "$folder/source" || { tail -n 20 "$log" >&2; exit 1; }
rm -rf "$folder/source"
wheels=("$folder"/megatron_sparse-*.whl)
install "installing ${wheels[0]##*/} with train" "$log" "${wheels[0]}[train]"

mkdir "$folder/user"
cd "$folder/user"
"$PYTHON" -m pip list 2>/dev/null | grep -E '^(torch|megatron)'
for package in torch megatron-core; do
  "$PYTHON" -m pip index versions "$package" 2>/dev/null | grep -E 'INSTALLED|LATEST' || true
done
"$PYTHON" -c 'import megatron_sparse; print(megatron_sparse.__file__)'

say "megatron-sparse doctor"
megatron-sparse doctor

export GLOO_SOCKET_IFNAME=lo
run=(
  megatron-sparse train name=wheel model=gpt_tiny data=mock tracking=off cluster.device=cpu
  cluster.ranks_per_node=2 training.iterations=14 training.save_interval=5 training.lr_warmup_iters=2
  model.num_layers=2 model.hidden_size=64 model.seq_length=32 data.vocab_size=512
  megatron.num_workers=0 scheme=agsparse compression.warmup_iters=2 compression.ramp_iters=2
)
# last_iteration: of the run so far
last_iteration() {
  tail -n 1 runs/wheel/breakdown.jsonl | "$PYTHON" -c 'import json; print(json.loads(input())["iteration"])'
}
say "${run[*]} megatron.exit_interval=10"
"${run[@]}" megatron.exit_interval=10
[ "$(last_iteration)" = 10 ] || fail "the run did not end after iteration 10" 10 \
  "$(last_iteration)" "see $folder/user/runs/wheel"
say "${run[*]} resume=must"
"${run[@]}" resume=must
[ "$(last_iteration)" = 14 ] || fail "the resumed run did not end after iteration 14" 14 \
  "$(last_iteration)" "see $folder/user/runs/wheel"
say "the wheel works: ten iterations, resumed to 14"

#!/usr/bin/env bash
# Trains a small model with compressed gradients on this machine, starting from a bare checkout:
# makes an environment, prepares a corpus from texts that are already installed, runs two ranks
# (gloo on CPU, NCCL on GPUs), prints the bytes sent beside those of dense synchronisation, and
# writes a report.
#
#   bash scripts/quickstart.sh [starcoder|gpt] [HYDRA-OVERRIDE...]
#
# starcoder (the default) learns the Python standard library's source, gpt English documentation.
# A second run reuses the environment and the corpus. Example of an override:
#   bash scripts/quickstart.sh gpt compression.density=0.02
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=env.sh
. scripts/env.sh

family=starcoder
case ${1:-} in
  starcoder | gpt)
    family=$1
    shift
    ;;
  "" | *=*) ;; # overrides for Hydra
  *)
    fail "the model is unknown" "starcoder | gpt" "$1" "bash scripts/quickstart.sh starcoder"
    ;;
esac
case $family in
  starcoder) kind=code name=quickstart ;;
  gpt) kind=prose name=quickstart_gpt ;;
esac

extras=(train)
# nvcc builds the CUDA part of the extension; without a GPU it is not needed.
if nvidia-smi --list-gpus >/dev/null 2>&1; then extras+=(cuda); fi
setup_environment "${extras[@]}"

say "corpus: data/$kind"
"$PYTHON" -m megatron_sparse.cli.main corpus --kind "$kind" --output "data/$kind"

runs=runs
for override in "$@"; do
  case $override in
    name=*) name=${override#name=} ;;
    runs_dir=*) runs=${override#runs_dir=} ;;
  esac
done
say "training"
"$PYTHON" scripts/train.py "model=${family}_tiny" experiment=quickstart "data=$kind" "name=$name" "$@"

say "report"
"$PYTHON" -m megatron_sparse.cli.main report "$runs/$name" --output "$runs/$name/report.html"

say "done: the run is in $runs/$name; next, the same model without compression, and both compared:
  $PYTHON scripts/train.py model=${family}_tiny experiment=quickstart data=$kind scheme=dense name=dense runs_dir=$runs
  $PYTHON -m megatron_sparse.cli.main report $runs/$name $runs/dense"

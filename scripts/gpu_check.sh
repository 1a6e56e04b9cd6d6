#!/usr/bin/env bash
# Runs every check of this project that needs one GPU, in under ten minutes.
#
#   bash scripts/gpu_check.sh [--dry-run] [--out DIR]
#
# Builds the extension, runs every test marked gpu, runs the peer kernels' tests under
# compute-sanitizer (memcheck, racecheck) if it is installed, and runs all GPU benchmarks, whose
# tables come last. Logs and JSON lines go to DIR (runs/gpu-check). --dry-run lists the stages. If a
# stage fails or exceeds its time, the next ones still run.
#
# Exit code: 0 all is well, 1 a stage failed, 2 an argument or Python is wrong, 3 there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# fail CODE WHAT EXPECTED GOT REMEDY
fail() {
  local code=$1
  shift
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit "$code"
}

dry_run=false
out=runs/gpu-check
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=true ;;
    --out)
      [ $# -gt 1 ] || fail 2 "--out has no value" "--out DIR" "nothing" "give a folder"
      out=$2
      shift
      ;;
    *) fail 2 "an argument is unknown" "[--dry-run] [--out DIR]" "$1" "leave it out" ;;
  esac
  shift
done

python=${PYTHON:-python3}
gpu_tests=(-m pytest -q -m gpu -p no:cacheprovider)
peer_tests=("${gpu_tests[@]}" tests/transport/test_peer_memory.py)
codecs=(-m megatron_sparse.cli.main bench codecs --device cuda --min-bytes 64M --density 0.01)

names=()
limits_s=()
commands=()
# stage NAME SECONDS COMMAND...
stage() {
  names+=("$1")
  limits_s+=("$2")
  shift 2
  commands+=("$(printf '%q ' "$@")")
}

sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
stage build 220 "$python" -m megatron_sparse.cuda_ext.build --cuda on
stage tests 100 "$python" "${gpu_tests[@]}"
if $dry_run || command -v "$sanitizer" >/dev/null; then
  for tool in memcheck racecheck; do
    stage "$tool" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" "${peer_tests[@]}"
  done
fi
stage codecs 60 "$python" "${codecs[@]}" --max-bytes 256M --iters 10 --json "$out/codecs.jsonl"
stage hashing 30 "$python" "${codecs[@]}" --max-bytes 64M --iters 5 \
  --format hash_bitmap,pairs,row_sparse --json "$out/hashing.jsonl"
# With a capacity the host never waits; without one, the numbers would include its waits for sizes.
stage host 18 "$python" -m megatron_sparse.cli.main bench collectives --ranks 1 --scheme dense,direct \
  --capacity 1.25 --min-bytes 64M --max-bytes 64M --density 0.01 --json "$out/host.jsonl"
stage engine 18 "$python" -m megatron_sparse.cli.main bench collectives --ranks 1 --scheme direct \
  --capacity 1.25 --nccl-engine --min-bytes 64M --max-bytes 64M --density 0.01 \
  --json "$out/engine.jsonl"
stage two-shot 30 "$python" -m megatron_sparse.bench.peer --json "$out/peer.jsonl"

if $dry_run; then
  for i in "${!names[@]}"; do
    printf '%-10s %4d s  %s\n' "${names[i]}" "${limits_s[i]}" "${commands[i]}"
  done
  exit 0
fi

"$python" -c 'import torch' 2>/dev/null ||
  fail 2 "this Python has no torch" "an interpreter with torch and this package" "$python" \
    "set PYTHON"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  fail 3 "there is no GPU" "one CUDA device" "none that torch sees" \
    "use a machine with a GPU; tests/cuda_emulator runs the kernels in an emulator instead"
mkdir -p "$out"
if ! command -v "$sanitizer" >/dev/null; then
  echo "compute-sanitizer is not installed: memcheck and racecheck are left out"
fi

failed=()
for i in "${!names[@]}"; do
  name=${names[i]}
  printf '[%4d s] %s\n' "$SECONDS" "$name"
  code=0
  timeout "${limits_s[i]}" bash -c "${commands[i]}" >"$out/$name.log" 2>&1 || code=$?
  if [ "$code" -ne 0 ]; then
    failed+=("$name")
    printf '         failed with %d; the end of %s:\n' "$code" "$out/$name.log"
    tail -n 15 "$out/$name.log"
  fi
done

echo
date -u +%Y-%m-%dT%H:%MZ
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__,
"CUDA", torch.version.cuda)'
for name in tests memcheck racecheck; do
  if [ -f "$out/$name.log" ]; then printf '%-10s %s\n' "$name" "$(tail -n 1 "$out/$name.log")"; fi
done
for name in codecs hashing host engine two-shot; do
  printf '\n%s\n' "$name"
  cat "$out/$name.log"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi

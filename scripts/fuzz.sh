#!/usr/bin/env bash
# Fuzzes every decoder of wire records under the address and undefined behaviour sanitizers.
#
#   bash scripts/fuzz.sh [SECONDS]
#
# Builds the CPU library with sanitizers, which takes a minute and a half on two cores, and runs
# tests/cuda_ext/fuzz_records.py for SECONDS (60). Needs g++ and a PYTHON (python3) with torch.
# Exits with 1 if a run found something.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

seconds=${1-60}
case $seconds in
  *[!0-9]* | "") fail "an argument is unknown" "[SECONDS]" "$seconds" "give whole seconds" ;;
esac
python=${PYTHON:-python3}
"$python" -c 'import torch' 2>/dev/null ||
  fail "this Python cannot run the decoders" "an interpreter with torch" "$python" "set PYTHON"
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null ||
  fail "there is no C++ compiler" "g++" "$cxx" "install one, or name it in CXX"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
CXX=$cxx "$python" -m megatron_sparse.cuda_ext.build --cuda off --sanitize --out "$work/library"
echo "fuzzing all decoders for $seconds s"
# Python itself is not sanitized. So the sanitizer's runtime must be preloaded, together with
# libstdc++, whose exceptions it intercepts; and leaks are not checked, for Python has some.
runtime="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so)"
code=0
ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0" LD_PRELOAD=$runtime \
  UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1} PYTHONMALLOC=malloc \
  "$python" -m tests.cuda_ext.fuzz_records --seconds "$seconds" \
  --library "$work/library/megatron_sparse_cpu.so" --seed-file "$work/seed" || code=$?
if [ "$code" != 0 ]; then
  if [ -f "$work/seed" ]; then
    echo "fuzz_records: 1 crash at seed $(cat "$work/seed"); repeat with --first" >&2
  fi
  echo "error: the fuzzer found a fault; see above" >&2
  exit 1
fi
echo "fuzz: no crash, no sanitizer report, no wrong answer"

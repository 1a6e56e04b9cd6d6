#!/usr/bin/env bash
# Fuzzes every decoder of wire records under the address and undefined behaviour sanitizers.
#
#   bash scripts/fuzz.sh [--install] [SECONDS]
#
# Half of SECONDS (60) goes to the core of the message decoder, on every instruction set, guided by
# coverage: with clang's libFuzzer if it is installed (--install gets it with apt-get), else with
# g++ and tests/cuda_ext/fuzz_loop.cpp. The other half goes to all decoders as Python calls them
# (tests/cuda_ext/fuzz_records.py); this needs g++ and a PYTHON (python3) with torch, or the script
# fails. Inputs of earlier findings are in tests/cuda_ext/fuzz_regressions and run first. The build
# takes another minute and a half on two cores. Exits with 1 if a run found something; an input that
# broke the core is then in a file crash-*. Add that file to the regressions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

seconds=60
install=false
for argument in "$@"; do
  case $argument in
    --install) install=true ;;
    *[!0-9]* | "") fail "an argument is unknown" "[--install] [SECONDS]" "$argument" \
      "give whole seconds" ;;
    *) seconds=$argument ;;
  esac
done

if $install && ! command -v clang++ >/dev/null; then
  sudo=()
  if [ "$(id -u)" != 0 ]; then sudo=(sudo); fi
  "${sudo[@]}" apt-get install -y --no-install-recommends clang libclang-rt-dev
fi

python=${PYTHON:-python3}
"$python" -c 'import torch' 2>/dev/null ||
  fail "this Python cannot run the decoders" "an interpreter with torch" "$python" "set PYTHON"
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null ||
  fail "there is no C++ compiler" "g++" "$cxx" "install one, or name it in CXX"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=cuda_ext/csrc
regressions=tests/cuda_ext/fuzz_regressions
common=(-std=c++17 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wno-psabi "-I$sources")
sanitize=("-fsanitize=address,undefined" -fno-sanitize-recover=all)

# Succeeds if clang++ can link a fuzzer, which needs its runtime library.
has_libfuzzer() {
  command -v clang++ >/dev/null &&
    printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -x c++ - -fsanitize=fuzzer,address -o "$work/probe" 2>"$work/probe.log"
}

drivers=(tests/cuda_ext/fuzz_decode.cpp)
if has_libfuzzer; then
  compiler=clang++
  coverage=-fsanitize=fuzzer-no-link
  link=(-fsanitize=fuzzer)
else
  compiler=$cxx
  coverage=-fsanitize-coverage=trace-pc
  link=()
  drivers+=(tests/cuda_ext/fuzz_loop.cpp)
fi

isas=("portable 4")
case $(uname -m) in
  x86_64 | amd64)
    common+=(-DMS_X86)
    isas+=("avx2 8 -mavx2" "avx512 16 -mavx512f -mavx512bw -mavx512vl -mavx512dq")
    ;;
esac

# compile NAME FLAG...: adds the object to the list; two compilers at a time, for small machines.
objects=()
compile() {
  local name=$1
  shift
  while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || built=false; done
  "$compiler" "${common[@]}" "${sanitize[@]}" "$@" -c -o "$work/$name.o" &
  objects+=("$work/$name.o")
}
built=true
for isa in "${isas[@]}"; do
  read -r name width flags <<<"$isa"
  # shellcheck disable=SC2086 # flags are words
  compile "$name" $coverage $flags "-DMS_ISA=$name" "-DMS_WIDTH=$width" "$sources/kernels_isa.cpp"
done
for source in "$sources"/{place,decode_records,decode_sum,rice_records}.cpp; do
  compile "$(basename "$source" .cpp)" "$coverage" "$source"
done
for source in "${drivers[@]}"; do compile "$(basename "$source" .cpp)" "$source"; done
while [ -n "$(jobs -rp)" ]; do wait -n || built=false; done
$built || fail "the fuzzer cannot be built" "no error of $compiler" "see above" "fix these errors"
"$compiler" "${sanitize[@]}" "${link[@]}" "${objects[@]}" -o "$work/fuzz"
"$python" -m tests.cuda_ext.fuzz_corpus "$work/corpus"
cp "$regressions"/* "$work/corpus"

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
# An abort is a signal; the loop's handler then writes its input to a file.
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:abort_on_error=1}
half=$(((seconds + 1) / 2))
code=0
echo "fuzzing the message decoder for $half s ($compiler)"
if [ ${#link[@]} -gt 0 ]; then
  "$work/fuzz" "$work/corpus" "-max_total_time=$half" -max_len=1048576 -timeout=20 \
    "-artifact_prefix=$PWD/" -verbosity=1 -print_final_stats=1 || code=$?
else
  "$work/fuzz" "$work/corpus" "$PWD" "$half" || code=$?
fi
if [ "$code" = 0 ]; then
  CXX=$cxx "$python" -m megatron_sparse.cuda_ext.build --cuda off --sanitize --out "$work/library"
  echo "fuzzing all decoders as Python calls them for $half s"
  # Python itself is not sanitized. So the sanitizer's runtime must be preloaded, together with
  # libstdc++, whose exceptions it intercepts; and leaks are not checked, for Python has some.
  runtime="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so)"
  ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" LD_PRELOAD=$runtime \
    PYTHONMALLOC=malloc "$python" -m tests.cuda_ext.fuzz_records --seconds "$half" \
    --library "$work/library/megatron_sparse_cpu.so" --seed-file "$work/seed" || code=$?
  if [ "$code" != 0 ] && [ -f "$work/seed" ]; then
    echo "fuzz_records: 1 crash at seed $(cat "$work/seed"); repeat with --first" >&2
  fi
fi
if [ "$code" != 0 ]; then
  echo "error: the fuzzer found a fault; see above" >&2
  exit 1
fi
echo "fuzz: no crash, no sanitizer report, no wrong answer"

#!/usr/bin/env bash
# Fuzzes the decoder of wire messages under the address and undefined behaviour sanitizers.
#
#   bash scripts/fuzz.sh [--install] [SECONDS]
#
# With clang's libFuzzer where it is there (--install gets it with apt-get), else with g++ and a loop
# of its own. Runs for SECONDS (60) once it is built; exits with 1 when something was found.
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
      "name whole seconds" ;;
    *) seconds=$argument ;;
  esac
done

if $install && ! command -v clang++ >/dev/null; then
  sudo=()
  if [ "$(id -u)" != 0 ]; then sudo=(sudo); fi
  "${sudo[@]}" apt-get install -y --no-install-recommends clang libclang-rt-dev
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=cuda_ext/csrc
common=(-std=c++17 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wno-psabi "-I$sources")

# Succeeds when clang++ can link a fuzzer, which needs its runtime library.
has_libfuzzer() {
  command -v clang++ >/dev/null &&
    printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -x c++ - -fsanitize=fuzzer,address -o "$work/probe" 2>"$work/probe.log"
}

if has_libfuzzer; then
  compiler=clang++
  sanitize=("-fsanitize=address,undefined" -fno-sanitize-recover=all -fsanitize=fuzzer-no-link)
  common+=(-DMS_LIBFUZZER)
  link=(-fsanitize=fuzzer)
else
  compiler=${CXX:-g++}
  command -v "$compiler" >/dev/null ||
    fail "there is no C++ compiler" "clang++ or g++" "$compiler" "install one, or use --install"
  sanitize=("-fsanitize=address,undefined" -fno-sanitize-recover=all)
  link=()
fi

isas=("portable 4")
case $(uname -m) in
  x86_64 | amd64)
    common+=(-DMS_X86)
    isas+=("avx2 8 -mavx2" "avx512 16 -mavx512f -mavx512bw -mavx512vl -mavx512dq")
    ;;
esac

objects=()
compile() {
  local name=$1
  shift
  "$compiler" "${common[@]}" "${sanitize[@]}" "$@" -c -o "$work/$name.o"
}
for isa in "${isas[@]}"; do
  read -r name width flags <<<"$isa"
  # shellcheck disable=SC2086 # flags are words
  compile "$name" $flags "-DMS_ISA=$name" "-DMS_WIDTH=$width" "$sources/kernels_isa.cpp" &
  objects+=("$work/$name.o")
done
for source in "$sources/place.cpp" "$sources/decode_records.cpp" tests/kernels/fuzz_decode.cpp; do
  name=$(basename "$source" .cpp)
  compile "$name" "$source" &
  objects+=("$work/$name.o")
done
for job in $(jobs -p); do wait "$job" || fail "the fuzzer cannot be built" "$compiler" \
  "see above" "fix what the compiler says"; done
"$compiler" "${sanitize[@]}" "${link[@]}" "${objects[@]}" -o "$work/fuzz"

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
echo "fuzzing for $seconds s ($compiler)"
code=0
if [ ${#link[@]} -gt 0 ]; then
  "$work/fuzz" "-max_total_time=$seconds" -max_len=1048576 "-artifact_prefix=$PWD/" -verbosity=1 \
    -print_final_stats=1 || code=$?
else
  "$work/fuzz" "$seconds" || code=$?
fi
if [ "$code" != 0 ]; then
  echo "error: the fuzzer found something; see above" >&2
  exit 1
fi

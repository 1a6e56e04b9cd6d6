#!/usr/bin/env bash
# Installs the requirements of the tests and runs the same checks as CI.
#
#   bash scripts/test.sh                 linters, the strict build of the extension, every test that is
#                                        not marked slow
#   bash scripts/test.sh --full          the same, and the tests marked slow
#   bash scripts/test.sh --quick         linters and the tests that need one process: at most 5 minutes
#                                        on 2 cores, once everything is installed and built
#   bash scripts/test.sh ARGUMENT...     only the tests; the arguments go to pytest
#
# Without arguments and with --full, the decoders are fuzzed at the end, for 60 s or for
# MEGATRON_SPARSE_FUZZ_SECONDS (0: not at all); the build for it takes another minute and a half.
# The first three forms run the tests in MEGATRON_SPARSE_TEST_WORKERS processes (default: the number
# of cores, at most 4, because many tests start ranks of their own). To do the same in the last
# form, add -n 4 --dist loadfile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=env.sh
. scripts/env.sh

# The tests of --quick: those that start no ranks, Megatron, CUDA emulator, browser or build.
quick_tests=(
  tests/test_bucket.py
  tests/test_profiler_ranges.py
  tests/cli
  tests/collectives/test_adaptive_ring.py
  tests/collectives/test_capacity.py
  tests/collectives/test_exactness.py
  tests/collectives/test_example_scheme.py
  tests/collectives/test_hierarchical_sparse.py
  tests/collectives/test_schemes.py
  tests/collectives/test_straggler.py
  tests/collectives/test_zen.py
  tests/compression
  tests/config
  tests/configs
  tests/cuda_ext/test_prune.py
  tests/cuda_ext/test_threshold.py
  tests/formats
  tests/planner/test_choice.py
  tests/planner/test_costs.py
  tests/pricing
  tests/reduction/test_progress.py
  tests/sparsity
  tests/straggler
  tests/telemetry
  tests/transport/test_virtual.py
)

selection=(-m "not slow")
lint=true
quick=false
# With OMP_NUM_THREADS set, nproc would print that number instead of the cores.
cores=$(env -u OMP_NUM_THREADS nproc)
if [ "${1:-}" = --full ]; then
  selection=()
  shift
elif [ "${1:-}" = --quick ]; then
  quick=true
  selection+=("${quick_tests[@]}")
  shift
elif [ $# -gt 0 ]; then
  lint=false
fi

# Strict: a part of the extension that cannot be built is an error, not left out.
export MEGATRON_SPARSE_STRICT=1
setup_environment dev cuda

# Hooks that pre-commit installs from the package index; the others are in the environment.
fetched=codespell,clang-format,shellcheck
failed=""
if $lint; then
  if [ ! -e .git ]; then
    say "linters: skipped, because pre-commit needs a git checkout"
  else
    log=$VIRTUAL_ENV/megatron-sparse-lint.log
    if ! logged "linters: preparing" "$log" pre-commit install-hooks; then
      if [ -n "${CI:-}" ]; then
        tail -n 20 "$log" >&2
        fail "the linters could not be installed" "pre-commit install-hooks" "the lines above" \
          "see $log; check the network and pip's index"
      fi
      say "linters: $fetched cannot be installed here ($log) and are skipped; CI runs them"
      export SKIP=$fetched
    fi
    say "linters: pre-commit run --all-files"
    pre-commit run --all-files || failed=linters
  fi
fi

say "building the extension, CUDA part included"
"$PYTHON" -m megatron_sparse.cuda_ext.build

if ! $quick; then
  # Slurm and other tools, if this user may install them; tests that lack a tool skip.
  bash scripts/system_packages.sh "$VIRTUAL_ENV/megatron-sparse-packages.log"
fi

say "tests"
code=0
if $lint; then
  # The tests of a file stay in one process: they share fixtures, and some of them ports. Files keep
  # the order of tests/conftest.py.
  selection+=(-n "${MEGATRON_SPARSE_TEST_WORKERS:-$((cores < 4 ? cores : 4))}" --dist loadfile
    --no-loadscope-reorder)
fi
# One thread a process: several ranks share the machine's cores.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$PYTHON" -m pytest "${selection[@]}" "$@" || code=$?
fuzz_seconds=${MEGATRON_SPARSE_FUZZ_SECONDS:-60}
if $lint && ! $quick && [ "$fuzz_seconds" != 0 ]; then
  say "fuzzing: every decoder under sanitizers for $fuzz_seconds s"
  PYTHON=$PYTHON bash scripts/fuzz.sh "$fuzz_seconds" || failed="${failed:+$failed and the }fuzzing"
fi
if [ -n "$failed" ]; then
  say "the $failed failed, see above" >&2
  [ "$code" -ne 0 ] || code=1
fi
exit "$code"

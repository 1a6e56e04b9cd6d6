#!/usr/bin/env bash
# Measures what docs/codecs.md says of the codec on this machine; nothing else should run on it.
#
#   bash benchmarks/codecs.sh DIR [ROUNDS]
#
# Writes DIR/<table>.jsonl and DIR/<table>.md for each table. Takes less than ten minutes, and 8 GiB of
# memory; ROUNDS (15) are timed for each row.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 1 ]; then
  printf 'error: there is no folder for the results\n  expected: %s\n  got:      nothing\n' \
    "bash benchmarks/codecs.sh DIR [ROUNDS]" >&2
  exit 2
fi
out=$1 rounds=${2:-15} python=${PYTHON:-python3}
mkdir -p "$out"

# bench NAME ARGUMENT...
bench() {
  local name=$1
  shift
  "$python" -m megatron_sparse.cli.main bench codecs --threads 1 --iters "$rounds" \
    --json "$out/$name.jsonl" "$@" | tee "$out/$name.txt"
  "$python" benchmarks/codec_tables.py "$out/$name.jsonl" >"$out/$name.md"
}

at_64M=(--min-bytes 64M --max-bytes 64M)
bench fp32 "${at_64M[@]}" --density 0.001,0.01,0.1,0.5,1 --format coo,pici,pici_paper,blocks
THP_MEM_ALLOC_ENABLE=1 bench fp32_huge_pages "${at_64M[@]}" --density 0.01,0.5 --format coo,pici
bench narrow "${at_64M[@]}" --density 0.01 --format coo,pici --dtype bf16,fp16
bench hashing "${at_64M[@]}" --density 0.01 --format hash_bitmap,pairs,row_sparse
bench sizes --min-bytes 1M --max-bytes 1G --density 0.01 --format coo,pici --no-peers

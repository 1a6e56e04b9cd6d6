// The launchers of hashing and row-sparse gradients, unmodified, compiled for the emulator; and the
// error texts that their bindings make from the kernels' findings.
#include "emulator_api.h"

#include "error_text.h"
#include "hash_bitmap.cu"
#include "hash_memory.cu"
#include "hash_partition.cu"
#include "hash_split.cu"
#include "row_sparse.cu"

using namespace megatron_sparse;

#define EXPORT_LAUNCH(name, Arguments)                      \
  EXPORT const char* name(const Arguments* call) {          \
    return guarded([&] { launch_##name(*call, nullptr); }); \
  }

EXPORT_LAUNCH(hash_map, HashMapArguments)
EXPORT_LAUNCH(hash_split, HashSplitArguments)
EXPORT_LAUNCH(hash_memory, HashMemoryArguments)
EXPORT_LAUNCH(hash_bitmap_pack, BitmapPackArguments)
EXPORT_LAUNCH(hash_bitmap_add, BitmapArguments)
EXPORT_LAUNCH(hash_bitmap_elements, BitmapArguments)
EXPORT_LAUNCH(row_sparse_match, RowMatchArguments)
EXPORT_LAUNCH(row_sparse_expand, RowExpandArguments)
EXPORT_LAUNCH(row_sparse_sum, RowSumArguments)
EXPORT_LAUNCH(row_sparse_union, RowUnionArguments)

EXPORT int64_t workspace_of_hash_split(int64_t count) {
  return hash_split_workspace_bytes(count);
}

EXPORT int64_t workspace_of_hash_memory(int64_t count, int64_t partitions, int64_t slots) {
  return hash_memory_workspace_bytes(count, partitions, slots);
}

EXPORT int64_t workspace_of_bitmap(int64_t positions) {
  return bitmap_workspace_bytes(positions);
}

EXPORT int64_t workspace_of_row_union(int64_t count) {
  return row_union_workspace_bytes(count);
}

EXPORT const char* refusal_of_entry(const char* name, int64_t position, int64_t limit,
                                    int64_t got) {
  return keep(entry_error_text(name, position, limit, got));
}

EXPORT const char* refusal_of_set(const char* name, int64_t position, int64_t before, int64_t got) {
  return keep(ascend_error_text(name, position, before, got));
}

EXPORT const char* refusal_of_missing(int64_t row) {
  return keep(missing_error_text(row));
}

EXPORT const char* refusal_of_absent(int64_t wanted, int64_t found) {
  return keep(absent_error_text(wanted, found));
}

EXPORT const char* refusal_of_cut(int64_t position, int64_t count, int64_t got) {
  return keep(cut_error_text(position, count, got));
}

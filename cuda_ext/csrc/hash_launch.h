// The launchers of ZEN's hashing on CUDA, between nvcc (no torch) and the bindings.
//
// All pointers of the arguments are on the device; workspaces are 256-byte aligned. Launches go to
// `stream` (a cudaStream_t) and return at once; the caller reads their error with cudaGetLastError.
// A status word holds the position of the first error, or kNothingFound; the caller reads it too.
#pragma once

#include <cstdint>

namespace megatron_sparse {

inline constexpr int64_t kNothingFound = -1;

// ---- hash_partition.cu: the partition hash of many entries ----

enum class HashMap : int { kPermute, kUnpermute, kPartition };  // hash_ops.py repeats it

struct HashMapArguments {
  HashMap map;
  const int64_t* entries;  // [count], in [0, numel)
  int64_t count;
  int64_t numel;
  int64_t partitions;  // of kPartition
  int64_t seed;
  int64_t* out;     // [count], written
  int64_t* status;  // [1], written: the first entry that is out of range
};

void launch_hash_map(const HashMapArguments& arguments, void* stream);

// ---- hash_memory.cu: Algorithm 1 ----

struct HashMemoryArguments {
  const int64_t* indices;       // [count], in [0, numel)
  const int64_t* partition_of;  // [count], in [0, partitions)
  int64_t count;                // below 2^31
  int64_t numel;
  int64_t partitions;
  int64_t parallel_slots;
  int64_t serial_slots;
  int64_t rehashes;
  int64_t seed;
  int64_t* entries;  // [count], written: numbers of entries, partition after partition
  int64_t* offsets;  // [partitions + 1], written
  int64_t* counts;   // [2], written: entries in serial memory, and those beyond it
  int64_t* status;   // [2], written: the first index, and partition, that is out of range
  void* workspace;
};

int64_t hash_memory_workspace_bytes(int64_t count, int64_t partitions, int64_t slots);

void launch_hash_memory(const HashMemoryArguments& arguments, void* stream);

// ---- hash_bitmap.cu: Algorithm 2 ----

struct BitmapPackArguments {
  const void* values;  // [positions], of value_dtype
  int value_dtype;
  int64_t positions;
  uint32_t* words;  // [2 ceil(positions / 64)], written
  void* packed;     // room for all values; the first nnz are written
  int64_t* nnz;     // [1], written
  void* workspace;
};

struct BitmapArguments {
  const uint32_t* words;  // [2 ceil(positions / 64)], not trusted
  int64_t positions;
  int64_t nnz;            // how many bits must be set
  int64_t numel;          // of the segment
  bool permuted;          // else an element is its position: one partition in its own order
  int64_t first;          // permuted position of the partition's first element
  int64_t seed;           // of the permutation
  const uint8_t* values;  // [nnz], of value_dtype; aligned for them
  int value_dtype;
  float* acc;       // [numel]
  int64_t* status;  // [2], written: BitmapField and what was found
  void* workspace;
};

// The fields that a status names; cuda_ext/hash_ops.py repeats them.
enum BitmapField : int64_t { kFits = 0, kFieldNnz = 1, kFieldBitmap = 2 };

int64_t bitmap_workspace_bytes(int64_t positions);

void launch_hash_bitmap_pack(const BitmapPackArguments& arguments, void* stream);

// Adds the values to their elements of acc; acc is untouched unless the bitmap is right.
void launch_hash_bitmap_add(const BitmapArguments& arguments, void* stream);

}  // namespace megatron_sparse

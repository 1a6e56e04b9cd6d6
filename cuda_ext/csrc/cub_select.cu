// CUB's DeviceSelect as a peer of `bench codecs`: the elements that are not zero, without their
// indices. Compiled by the benchmark (megatron_sparse/bench/codec/gpu_peers.py); not part of the
// library.
#include <cub/device/device_select.cuh>

namespace {

struct IsNonzero {
  __device__ bool operator()(float value) const { return value != 0; }
};

}  // namespace

// With a null `scratch` it only writes the number of bytes that it needs. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int cub_select_nonzero(
    void* scratch, size_t* scratch_bytes, const float* from, float* to, long long* count,
    long long numel, void* stream) {
  return cub::DeviceSelect::If(scratch, *scratch_bytes, from, to, count, numel, IsNonzero(),
                               static_cast<cudaStream_t>(stream));
}

// Function attributes that differ between host compilers and nvcc.
#pragma once

#ifdef __CUDACC__
#define MS_INLINE __host__ __device__ __forceinline__
#define MS_INLINE_MEMBER __host__ __device__ __forceinline__
#else
// Internal linkage on purpose: files compiled for AVX-512 must not lend their copy of an inline
// function to the rest of the library.
#define MS_INLINE static inline __attribute__((always_inline))
// The same for static member functions, which are inline already.
#define MS_INLINE_MEMBER inline __attribute__((always_inline))
#endif

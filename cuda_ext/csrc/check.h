// Argument checks of the bindings. The message is "what | expected | got", which the Python
// wrappers turn into an ExtensionError.
//
// torch calls an implementation for the CPU only if all tensors lie there. So only those for CUDA,
// and checks that both share, look at devices.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dtypes.h"
#include "rice.h"

#define MS_CHECK(condition, what, expected, got)            \
  do {                                                      \
    if (!(condition)) {                                     \
      std::ostringstream message;                           \
      message << what << " | " << expected << " | " << got; \
      throw std::runtime_error(message.str());              \
    }                                                       \
  } while (0)

namespace megatron_sparse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kMaxNumel = int64_t{1} << 40;  // of a bucket

inline int dtype_code(const Tensor& tensor, std::string_view name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kFp32;
    case ScalarType::BFloat16:
      return kBf16;
    case ScalarType::Half:
      return kFp16;
    default:
      MS_CHECK(false, name << " has the wrong dtype", "float32, bfloat16 or float16",
               "scalar type " << static_cast<int>(tensor.scalar_type()));
  }
  return -1;
}

// Refuses an entry outside [0, limit).
inline void refuse_entry(const char* name, int64_t position, int64_t limit, int64_t got) {
  MS_CHECK(false, name << " is out of range at position " << position, "0 to " << limit - 1, got);
}

inline void check_beside(const Tensor& tensor, const Tensor& other, std::string_view name) {
  MS_CHECK(tensor.is_cpu() == other.is_cpu() &&
               (tensor.is_cpu() || tensor.get_device_index() == other.get_device_index()),
           name << " is on the wrong device", "the device of the others", "another");
}

inline void check_flat(const Tensor& tensor, std::string_view name) {
  MS_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), name << " has the wrong shape",
           "a contiguous 1-D tensor", "a tensor of " << tensor.dim() << " dimensions");
}

inline void check_vector(const Tensor& tensor, std::string_view name, ScalarType dtype,
                         int64_t numel) {
  check_flat(tensor, name);
  MS_CHECK(tensor.scalar_type() == dtype, name << " has the wrong dtype",
           "scalar type " << static_cast<int>(dtype),
           "scalar type " << static_cast<int>(tensor.scalar_type()));
  MS_CHECK(numel < 0 || tensor.numel() == numel, name << " has the wrong length", numel,
           tensor.numel());
}

// Likewise, on the device of another tensor.
inline void check_vector(const Tensor& tensor, std::string_view name, ScalarType dtype,
                         int64_t numel, const Tensor& other) {
  check_vector(tensor, name, dtype, numel);
  check_beside(tensor, other, name);
}

// An int64 table beside another tensor, whose content is not read; null without one.
inline int64_t* check_table(const std::optional<Tensor>& table, std::string_view name,
                            int64_t numel, const Tensor& other) {
  if (!table.has_value()) return nullptr;
  check_vector(*table, name, ScalarType::Long, numel, other);
  return static_cast<int64_t*>(table->mutable_data_ptr());
}

inline void check_dtype_code(int64_t code, std::string_view name) {
  MS_CHECK(code >= kFp32 && code <= kFp16, name << " is unknown", "0 (fp32), 1 (bf16) or 2 (fp16)",
           code);
}

// A dtype of the values in messages: those of check_dtype_code, and Rice's quantised ones.
inline void check_message_dtype(int64_t code, std::string_view name) {
  MS_CHECK(code >= kFp32 && code <= kQ2, name << " is unknown",
           "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)", code);
}

// Offsets that cut [first, last) into consecutive pieces; a CPU tensor.
inline const int64_t* check_offsets(const Tensor& offsets, std::string_view name) {
  check_vector(offsets, name, ScalarType::Long, -1);
  MS_CHECK(offsets.numel() >= 1, name << " is empty", "at least one offset", 0);
  const int64_t* at = static_cast<const int64_t*>(offsets.const_data_ptr());
  MS_CHECK(at[0] >= 0 && at[offsets.numel() - 1] <= kMaxNumel, name << " is out of range",
           "offsets in [0, 2^40]", at[0] << " to " << at[offsets.numel() - 1]);
  for (int64_t i = 1; i < offsets.numel(); ++i) {
    MS_CHECK(at[i - 1] <= at[i], name << " is not ascending",
             "at least " << at[i - 1] << " at position " << i, at[i]);
  }
  return at;
}

// The most non-zero elements of each segment; a CPU tensor. Null without a limit.
inline const int64_t* check_capacity(const std::optional<Tensor>& capacity, int64_t segments,
                                     std::string_view name) {
  if (!capacity.has_value()) return nullptr;
  check_vector(*capacity, name, ScalarType::Long, segments);
  const int64_t* at = static_cast<const int64_t*>(capacity->const_data_ptr());
  for (int64_t s = 0; s < segments; ++s) {
    MS_CHECK(at[s] >= 0, name << " is out of range", "0 or more", at[s]);
  }
  return at;
}

// Where records begin, and the end of the last one, from 0 on; a CPU tensor. Null without one.
inline const int64_t* check_slots(const std::optional<Tensor>& slots, int64_t records,
                                  std::string_view name) {
  if (!slots.has_value()) return nullptr;
  check_vector(*slots, name, ScalarType::Long, records + 1);
  const int64_t* at = check_offsets(*slots, name);
  for (int64_t i = 0; i <= records; ++i) {
    MS_CHECK(at[0] == 0 && at[i] % 16 == 0, name << " are no places of records",
             "multiples of 16, from 0 on", at[i]);
  }
  return at;
}

inline void check_cut(const int64_t* at, int64_t pieces, int64_t numel, std::string_view name) {
  MS_CHECK(at[0] == 0 && at[pieces] == numel, name << " does not cut the whole bucket",
           "0 to " << numel, at[0] << " to " << at[pieces]);
}

}  // namespace megatron_sparse

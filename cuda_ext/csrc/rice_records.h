// Records of format Rice (rice.h) as the decoder of messages sees them: it trusts nothing in them.
// Free of torch, like decode_records.h.
#pragma once

#include "decode_records.h"
#include "rice.h"

namespace megatron_sparse {

// Checks the sub-header and the sizes; the header was checked. Sets the units and sections.
Status start_rice(const Header& header, int64_t available, DecodeChunk& record);

// Checks the rows and the words of one chunk.
Status check_rice_chunk(const DecodeChunk& chunk, const Kernels& kernel);

// Adds one checked chunk; `target` is the segment's first element.
void add_rice_chunk(const DecodeChunk& chunk, float* target, const Kernels& kernel);

}  // namespace megatron_sparse

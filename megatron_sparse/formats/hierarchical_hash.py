"""ZEN's hierarchical hashing (Algorithm 1): groups a rank's entries by the server they go to.

An entry is a non-zero element: its index and value. Deviations from the paper:

- A memory slot holds the number of an entry instead of its index, so that values need not lie in a
  dense tensor.
- Check, write and read after write are one compare-and-swap. As separate steps they can lose an
  entry (the reason is in `csrc/hash_partition_hierarchical.cpp`).
- The serial memory grows to hold the entries that overflow it.
- Each partition comes sorted, so the result depends neither on threads nor on the device
  (`csrc/hash_memory.cu`).

On the wire an entry costs its COO record's 4 bytes and its value.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import VALUE_DTYPES, Message
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, HEADER_BYTES, pad16


@dataclass(frozen=True)
class Partitioned:
    """The result of Algorithm 1: the entries of every partition, each sorted by index.

    Attributes:
        indices_K: int64, partition after partition.
        values_K: their values, bits unchanged.
        offsets: n + 1 offsets of the partitions.
    """

    indices_K: torch.Tensor
    values_K: torch.Tensor
    offsets: list[int]

    def of(self, partition: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values of one partition; views."""
        begin, end = self.offsets[partition : partition + 2]
        return self.indices_K[begin:end], self.values_K[begin:end]


def hierarchical_hash(
    partition_hash: PermutationHash,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    *,
    parallel_slots: int | None = None,
    serial_slots: int | None = None,
    rehashes: int = 3,
    seed: int = 0,
) -> Partitioned:
    """Groups a rank's entries by partition with Algorithm 1; partition i is for server i.

    The paper has one memory for all n partitions: for K entries r1 = 2 K slots that k = 3 hashes
    choose from, and r2 = r1 / 10 serial ones. Here each has its own, by default r1 = 2 K / n.

    An entry that finds the serial memory of its partition full is set aside. Afterwards that serial
    memory is extended by exactly as many slots as needed, so no entry is lost, even if all indices
    fall into one partition.

    Args:
        partition_hash: h0; the same on all ranks.
        indices_K: int64, in [0, numel).
        values_K: fp32, bf16 or fp16.
        parallel_slots: r1: slots of each partition that the hashes choose from.
        serial_slots: r2: slots of each partition for entries that find their hashed slots taken.
        rehashes: k, how many hashes h_1 to h_k an entry tries.
        seed: of h_1 to h_k; may differ between ranks.

    Returns:
        The entries by partition.

    Raises:
        ExtensionError: arguments that do not fit together.
    """
    partitions = partition_hash.partitions
    # The defaults are rounded up.
    if parallel_slots is None:
        parallel_slots = max(-(-2 * indices_K.numel() // partitions), 1)
    if serial_slots is None:
        serial_slots = -(-parallel_slots // 10)
    partition_K = partition_hash.partition_of(indices_K)
    out_indices, out_values, offsets, _ = hash_ops.hierarchical_hash(
        indices_K,
        values_K,
        partition_K,
        partition_hash.numel,
        partitions,
        hash_ops.HashMemory(parallel_slots, serial_slots, rehashes, seed),
    )
    return Partitioned(out_indices, out_values, offsets.tolist())


def entries(message: Message) -> tuple[torch.Tensor, torch.Tensor]:
    """The non-zero elements of a message that this rank made; `-0.0` is zero, NaN is not.

    On CUDA the CPU waits for a copy of all headers, and for each dense record.

    Args:
        message: of COO and dense records, as `scheme.format=coo` makes them.

    Returns:
        int64 ascending elements of the bucket, and their values in the wire's dtype, on the
        message's device.

    Example:
        A COO record of a segment that begins at 4, with index 1, gives element 5.
    """
    dtype = VALUE_DTYPES[message.value_dtype]
    offsets = message.layout.segment_offsets.tolist()
    indices, values = [], []
    records = message.records().split(message.segment_bytes)
    if not records:  # a bucket without segments
        nothing = message.buffer.new_empty(0, dtype=torch.int64)
        return nothing, nothing.to(dtype)
    heads = torch.stack([record[:HEADER_BYTES] for record in records]).cpu().numpy()
    for record, head, (start, stop) in zip(records, heads, pairwise(offsets), strict=True):
        # This rank made the record: its checksum is not looked at (None), and the sender's rank,
        # which only an error would name, does not matter.
        header = Header.unpack(head.tobytes(), rank=0, payload_sum=None)
        sections = record[HEADER_BYTES:]
        if header.format == FORMAT_DENSE:
            dense = sections[: (stop - start) * dtype.itemsize].view(dtype)
            index_K = dense.nonzero().squeeze(1)
            value_K = dense[index_K]
        else:
            assert header.format == FORMAT_COO, "the scheme asks for COO"
            index_K = sections[: 4 * header.nnz].view(torch.int32).long()
            values_at = pad16(4 * header.nnz)
            value_bytes = header.nnz * dtype.itemsize
            value_K = sections[values_at : values_at + value_bytes].view(dtype)
        indices.append(index_K + start)
        values.append(value_K)
    return torch.cat(indices), torch.cat(values)


def split(
    partition_hash: PermutationHash, indices_K: torch.Tensor, values_K: torch.Tensor
) -> Partitioned:
    """Computes the result of `hierarchical_hash` by a stable partition instead of a hash memory.

    For ascending indices the two results are equal. This takes one sort by small keys, on a CPU a
    tenth of Algorithm 1's time. The paper's point is to avoid a sort on a GPU, but records need
    ascending indices, for which `hierarchical_hash` sorts twice on CUDA.

    Args:
        partition_hash: h0; the same on all ranks.
        indices_K: int64, ascending, in [0, numel).
        values_K: fp32, bf16 or fp16, one for each index.

    Raises:
        ExtensionError: an index is not in [0, numel).
    """
    partition_K = partition_hash.partition_of(indices_K)
    order_K, offsets = hash_ops.split(partition_K, partition_hash.partitions)
    return Partitioned(indices_K[order_K], values_K[order_K], offsets.tolist())

"""The two CUDA streams that buckets are worked on, and the order of their work.

    codec     prepare and select: all that a job does before its gate
    network   exchange, decode, and all else behind the gate

Each stream runs the buckets in the order of their launch. A bucket enters the codec stream after
the launching stream's work, enters the network stream after its own selection, and the stream that
waits for it goes on after its work on the network stream. So bucket N + 1 is selected beside the
exchange of bucket N. Exchanges follow one another, and so do the decoders between them: buffers
that only work behind the gate uses are shared by all buckets (`Exchange.take`). Memory that is
allocated before the gate and used behind it must be named to `used_here`; a buffer that outlives
the step needs no more than that, because the next step's launch comes after this one's
`finish_event`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class BucketStreams:
    """The streams of a process, on CUDA; see the module's docstring.

    Args:
        device: of the buckets.
    """

    def __init__(self, device: torch.device) -> None:
        self.codec = torch.cuda.Stream(device)
        self.network = torch.cuda.Stream(device)


class JobStream:
    """The stream that one job is on.

    Args:
        streams: the process's; None on a CPU, where nothing here has an effect.
    """

    def __init__(self, streams: BucketStreams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.codec
        self._selected: torch.cuda.Event | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether there are streams at all."""
        return self._streams is not None

    def current(self) -> AbstractContextManager[object]:
        """Makes the job's stream the thread's current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Lets the job's stream wait for an event, if there is one."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def at_gate(self) -> None:
        """The job's local work is queued; call it with the job's stream current."""
        if self._streams is not None and self._stream is self._streams.codec:
            self._selected = self.marked_here()

    def pass_gate(self) -> None:
        """Moves the job to the network stream, behind its own local work."""
        if self._streams is not None and self._selected is not None:
            self._stream = self._streams.network
            self._stream.wait_event(self._selected)
            self._selected = None

    def marked_here(self) -> torch.cuda.Event | None:
        """An event after all that the current stream has queued; None on a CPU."""
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tells torch's allocator that tensors are used on the current stream from here on.

    Call it behind the gate for memory that was allocated before it: freed by the host, it would
    else go to the next bucket's selection while the network stream still reads it.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())

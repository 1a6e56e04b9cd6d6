"""A transport with faults: its rank dies, is slow, or sends damaged messages."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.wire import MAGIC
from tests.collectives.cases import Forwarding

Piece = tuple[int, torch.Tensor]


class Killed(BaseException):
    """The rank of a virtual cluster has died."""


@dataclass
class Fault:
    """A fault: its kind, the rank, and the number of the operation at which it happens.

    `kind` is one of `kill`; `kill while sending` and `stop` (real processes only); `slow`,
    `header`, `payload`, `size`, `truncate` and `replay`: the peer receives the last message again.
    """

    kind: str
    victim: int
    at: int


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_process_soon() -> None:
    """SIGKILL to oneself, while the posted message is on its way."""
    threading.Timer(0.02, kill_process).start()


def stop_process() -> None:
    """SIGSTOP to oneself; the test kills the process in the end."""
    os.kill(os.getpid(), signal.SIGSTOP)
    # Another thread may take the signal: this one must not post before it has.
    time.sleep(60)


def die_virtually() -> None:
    """Ends the rank's generator."""
    raise Killed


class FaultyTransport(Forwarding):
    """See `Transport`; forwards everything except for the fault.

    `posted`: operations so far. `struck`: whether the fault has found something to spoil.
    """

    def __init__(self, transport: Any, fault: Fault, acts: dict[str, Callable[[], None]]) -> None:
        super().__init__(transport)
        self._fault = fault
        self._acts = acts
        self._last_sent: dict[int, torch.Tensor] = {}
        self.posted = 0
        self.struck = False

    def all_reduce_(self, values):
        self._post()
        return self._transport.all_reduce_(values)

    def reduce_scatter(self, shard, values, *, average=False):
        self._post()
        return self._transport.reduce_scatter(shard, values, average=average)

    def all_gather(self, gathered, own):
        if self._post() and self._fault.kind == "size":
            own = self._spoil(own)
        return self._transport.all_gather(gathered, own)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece], tag: int):
        concerns_somebody = any(values.numel() for _, values in [*sends, *receives])
        if concerns_somebody and self._post():
            sends = [(peer, self._spoil(values, peer)) for peer, values in sends]
        for peer, values in sends:
            if values.numel():
                self._last_sent[peer] = values.clone()
        return self._transport.exchange(sends, receives, tag)

    def _post(self) -> bool:
        """Counts the operation; returns whether the fault happens now."""
        self.posted += 1
        strikes = (self.posted - 1, self._transport.rank) == (self._fault.at, self._fault.victim)
        if strikes and self._fault.kind in self._acts:
            self.struck = True
            self._acts[self._fault.kind]()
        return strikes

    def _spoil(self, values: torch.Tensor, peer: int | None = None) -> torch.Tensor:
        spoilt = _spoil(values, self._fault, None if peer is None else self._last_sent.get(peer))
        self.struck = self.struck or spoilt is not values
        return spoilt


def _spoil(values: torch.Tensor, fault: Fault, last: torch.Tensor | None) -> torch.Tensor:
    """A damaged copy of a message as the fault asks, or the message itself if it does not apply."""
    data = values.contiguous().view(torch.uint8).clone()
    is_words = values.dtype == torch.int64
    if fault.kind == "size" and is_words:
        # In an agreement, flips a bit of the fingerprint, the count or a checksum, not of the
        # padding.
        _flip(data, bit=(7 * fault.at) % min(8 * data.numel(), 128))
    elif fault.kind == "header" and data[:4].numpy().tobytes() == MAGIC:
        _flip(data, bit=(53 * (fault.at + 1)) % (8 * 48))
    elif fault.kind == "payload" and data[:4].numpy().tobytes() == MAGIC and data.numel() > 48:
        _flip(data[48 : 48 + int(data[24:32].view(torch.int64))], bit=997 * (fault.at + 1))
    elif fault.kind == "truncate" and data.numel() >= 16 and not is_words:
        return values[: values.numel() // 2].clone()
    elif fault.kind == "replay" and last is not None and not torch.equal(last, values):
        return last
    else:
        return values
    return data.view(values.dtype)


def _flip(data: torch.Tensor, bit: int) -> None:
    bit %= 8 * data.numel()
    data[bit // 8] ^= 1 << bit % 8

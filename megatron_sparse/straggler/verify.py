"""Proves a schedule correct by replaying it, independently of its generator."""

from __future__ import annotations

from megatron_sparse.errors import ScheduleError
from megatron_sparse.straggler.schedule import Round, Schedule


def verify(schedule: Schedule) -> None:
    """Checks the precondition's use, every round, and the postcondition.

    A chunk is added once: when an early rank that holds its sum of the early ranks and the
    straggler exchange it. Everything else is a copy of a complete chunk.

    Raises:
        ScheduleError: names round and transfer: a rank meets two others in a round or sends or
            receives two chunks; a chunk is sent by a rank that does not hold it complete, or to
            one that does; in the end a rank lacks a chunk.
    """
    partial = dict(enumerate(schedule.early_ranks))
    complete: list[set[int]] = [set() for _ in range(schedule.world_size)]
    for number, transfers in enumerate(schedule.rounds):
        _check_matching(number, transfers, schedule.world_size)
        exchanged = {(t.sender, t.receiver, t.chunk) for t in transfers}
        arrived: list[tuple[int, int]] = []
        for sender, receiver, chunk in transfers:
            if chunk not in range(schedule.chunks):
                raise _wrong(number, f"chunk {chunk} does not exist")
            if chunk in complete[receiver]:
                raise _wrong(number, f"rank {receiver} has chunk {chunk} already")
            reduces = {sender, receiver} == {partial[chunk], schedule.straggler} and (
                receiver,
                sender,
                chunk,
            ) in exchanged
            if chunk not in complete[sender] and not reduces:
                raise _wrong(number, f"rank {sender} sends chunk {chunk}, which it does not hold")
            arrived.append((receiver, chunk))
        for receiver, chunk in arrived:
            complete[receiver].add(chunk)
    for rank, chunks in enumerate(complete):
        if len(chunks) < schedule.chunks:
            lacking = sorted(set(range(schedule.chunks)) - chunks)
            raise _wrong(len(schedule.rounds), f"rank {rank} lacks chunks {lacking} in the end")


def _check_matching(number: int, transfers: Round, world_size: int) -> None:
    peers: dict[int, int] = {}
    if len({t.sender for t in transfers}) < len(transfers):
        raise _wrong(number, "a rank sends two chunks")
    for sender, receiver, _ in transfers:
        if sender == receiver or not {sender, receiver} <= set(range(world_size)):
            raise _wrong(number, f"{sender} -> {receiver} is not between two ranks")
        for one, other in ((sender, receiver), (receiver, sender)):
            if peers.setdefault(one, other) != other:
                raise _wrong(number, f"rank {one} meets ranks {peers[one]} and {other}")


def _wrong(number: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"round {number} of a straggler-aware schedule is wrong",
        expected="one exchange for each rank, of chunks that it holds, with a rank that lacks them",
        got=what,
        remedy="make it with megatron_sparse.straggler.make_schedule",
    )

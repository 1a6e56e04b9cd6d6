"""The processes that Megatron's checkpoints start, after the end of their rank."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.waiting import is_gone, until

MANAGER = """
import multiprocessing, os, signal
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron_sparse.megatron import checkpoint_process

for _ in range(2):
    checkpoint_process.end_with_rank()
queue = filesystem_async.get_write_results_queue()
assert filesystem_async.get_write_results_queue() is queue
queue.put("result")
assert queue.get() == "result"
(manager,) = multiprocessing.active_children()
# A pipe to the rank's log would else stay open, and the rank's end wait for it.
assert os.readlink(f"/proc/{manager.pid}/fd/1") == os.devnull
print(manager.pid, flush=True)
signal.pause()
"""
WRITER = """
import os, signal, torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller
from megatron_sparse.megatron import checkpoint_process

for _ in range(2):
    checkpoint_process.end_with_rank()
torch.cuda.synchronize, torch.distributed.get_rank = lambda: None, lambda: 0


def write(word):
    child = os.fork()
    if child:
        print(os.getpid(), child, flush=True)
    signal.pause()


caller = TemporalAsyncCaller()
caller.schedule_async_call(AsyncRequest(write, ("word",), []))
signal.pause()
"""


@pytest.mark.parametrize(
    ("script", "received"),
    [(MANAGER, signal.SIGKILL), (MANAGER, signal.SIGTERM), (WRITER, signal.SIGKILL)],
    ids=["manager, killed", "manager", "asynchronous writer and its own process, killed"],
)
def test_they_end_with_a_rank_that_is_killed(script, received):
    rank = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    started = [int(word) for word in rank.stdout.readline().split()]
    assert started
    try:
        os.kill(rank.pid, received)
        until(lambda: all(map(is_gone, started)))
    finally:
        rank.kill()
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        rank.communicate()

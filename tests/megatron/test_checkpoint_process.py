"""The process that Megatron's checkpoints start, after the end of its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.waiting import is_gone, until

RANK = """
import multiprocessing, signal
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron_sparse.megatron import checkpoint_process

for _ in range(2):
    checkpoint_process.end_with_rank()
queue = filesystem_async.get_write_results_queue()
assert filesystem_async.get_write_results_queue() is queue
queue.put("result")
assert queue.get() == "result"
(manager,) = multiprocessing.active_children()
print(manager.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("received", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_rank_that_is_killed(received):
    rank = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RANK], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    manager = int(rank.stdout.readline())
    try:
        os.kill(rank.pid, received)
        until(lambda: is_gone(manager))
    finally:
        rank.kill()
        rank.communicate()
        if not is_gone(manager):
            os.kill(manager, signal.SIGKILL)

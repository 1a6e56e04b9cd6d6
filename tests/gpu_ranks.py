"""Several processes on one GPU, which NCCL takes for as many machines."""

import os
import socket
import subprocess
import sys


def on_one_gpu(ranks: int, *arguments: str, limit_s: float = 180, **variables: str) -> list[str]:
    """Runs Python with these arguments once for each rank; returns what each printed.

    All must end with 0 within `limit_s`. `variables` of the environment come besides those that
    name the ranks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=shared | variables | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    return said

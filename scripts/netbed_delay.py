"""Cables with a delay, for `scripts/netbed.sh` on kernels without netem.

    netbed_delay.py DELAY_US A B [A B]...

Each cable is a pair of new TAP devices, A and B, in this network namespace; they may be moved to
others. A packet that leaves one arrives at the other DELAY_US microseconds later. Packets keep
their offloads (64 KiB at once), so Python can carry gigabits. Nothing is dropped here: give the
devices queues with a rate. Prints `ready` when the devices exist and runs until it is killed.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
CSUM_TSO4_TSO6 = 0x7
LARGEST = 65536 + 64
BATCH = 64


def tap(name: str) -> int:
    """Makes a TAP device; returns its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # The kernel's `struct ifreq`: name, flags, padding.
    request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    fcntl.ioctl(file, TUNSETIFF, request)
    fcntl.ioctl(file, TUNSETOFFLOAD, CSUM_TSO4_TSO6)
    return file


def carry(delay_s: float, ends: dict[int, int]) -> None:
    """Carries packets for ever: `ends` has the other end's file for each end's."""
    files = list(ends)
    # (time of arrival, the file to write to, packet), the earliest first.
    late: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select(files, [], [], wait_s)
        for file in readable:
            with suppress(BlockingIOError):
                for _ in range(BATCH):
                    late.append((time.monotonic() + delay_s, ends[file], os.read(file, LARGEST)))
        now_s = time.monotonic()
        while late and late[0][0] <= now_s:
            _, file, packet = late.popleft()
            with suppress(OSError):  # its host has not been set up yet, or is gone
                os.write(file, packet)


if __name__ == "__main__":
    names = sys.argv[2:]
    files = [tap(name) for name in names]
    other = [files[i ^ 1] for i in range(len(files))]
    print("ready", flush=True)
    carry(int(sys.argv[1]) / 1e6, dict(zip(files, other, strict=True)))

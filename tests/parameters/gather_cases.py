"""A bucket of parameters on virtual ranks, gathered exactly or by a subclass in another way.

And a transport of one process, for what ranks agree on.
"""

from contextlib import contextmanager

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.parameters.gather import ExactGather, Way
from megatron_sparse.parameters.lossy import LossyGather, LossyWay
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import NO_TIME
from tests.records import Kept

N = 4
SHARD = 1000
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = {2: torch.int16, 4: torch.int32}


class Echo:
    """A transport on which the other ranks say the same, or rank 1 something else."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, other=None, nodes=(0, 1)):
        self.other = other
        self.nodes = nodes
        self.world_size = len(nodes)

    def all_gather(self, gathered, own):
        rows = gathered.view(self.world_size, -1)
        rows[:] = own
        if self.other is not None:
            rows[1] = self.other(own)
        return self

    def finish(self):
        pass


class Group:
    """A bucket on N virtual ranks; `expected` is what a raw gather would leave on all of them."""

    kind, way = ExactGather, Way

    def __init__(
        self,
        dtype=torch.bfloat16,
        verify_every=1,
        n=N,
        shard=SHARD,
        nodes=None,
        device=None,
        **settings,
    ):
        topology = None if nodes is None else Topology(nodes, NO_TIME, NO_TIME)
        self.cluster = VirtualCluster(n, topology, device)
        self.generator = torch.Generator().manual_seed(5)
        first = torch.randn(n * shard, generator=self.generator).mul_(0.02).to(dtype)
        # Each rank starts with other bits: the first gather makes them equal.
        self.values = [(first + rank).to(device) for rank in range(n)]
        progress = Progress(torch.device("cpu"), 0)  # drives nothing: `gather` does
        self.sinks = [Kept() for _ in range(n)]
        self.gathers = []
        for rank, transport in enumerate(self.cluster.transports):
            grad_N = torch.zeros(n * shard, device=device)
            bucket = Bucket("group0.0", grad_N, (), CollectiveOp.REDUCE_SCATTER, n)
            way = self.way(**settings, verify_every=verify_every, per_node=nodes is not None)
            self.gathers.append(
                self.kind(bucket, self.values[rank], transport, way, progress, self.sinks[rank])
            )

    @classmethod
    def started(cls, *given, **options):
        """A group after its first gather, which is raw."""
        group = cls(*given, **options)
        group.gather()
        assert group.methods == {"raw"}
        return group

    def own(self, rank):
        """The shard that a rank owns, where it owns it."""
        return self.values[rank].view(len(self.values), -1)[rank]

    def move(self, size=1e-4):
        """What an optimizer does: each owner writes its shard."""
        for rank in range(len(self.values)):
            own = self.own(rank)
            moved = torch.randn(own.numel(), generator=self.generator) * size
            own += moved.to(own.device, own.dtype)

    def expected(self):
        return torch.cat([self.own(rank).clone() for rank in range(len(self.values))])

    def gather(self, steps=None):
        pending = [
            gather.start(0 if steps is None else steps[rank])
            for rank, gather in enumerate(self.gathers)
        ]
        self.cluster.run(lambda transport: pending[transport.rank].run_alone())
        for each in pending:
            each.wait()

    def check(self):
        expected = self.expected()
        self.gather()
        for values in self.values:
            assert torch.equal(bits(values), bits(expected))

    @property
    def last(self):
        return [sink.gathers[-1] for sink in self.sinks]

    @property
    def methods(self):
        """How the ranks gathered the last time."""
        return {record.method for record in self.last}


class LossyGroup(Group):
    """As `Group`; beside it the masters, as an optimizer without the plugin would have them."""

    kind, way = LossyGather, LossyWay

    def __init__(self, bits=4, **options):
        super().__init__(torch.float32, bits=bits, **options)
        self.masters = [self.own(rank).clone() for rank in range(len(self.values))]

    @contextmanager
    def update(self, *, accepted=True):
        """In the block, the optimizer writes the ranks' shards."""
        for gather in self.gathers:
            gather.begin_step()
        yield
        for gather in self.gathers:
            gather.end_step(accepted=accepted)

    def move(self, size=1e-4, *, accepted=True):
        """One step of the optimizer on every rank; checks that it finds its master."""
        with self.update(accepted=accepted):
            for rank, master in enumerate(self.masters):
                own = self.own(rank)
                assert torch.equal(own, master)
                if accepted:
                    own += torch.randn(own.numel(), generator=self.generator) * size
                    master.copy_(own)

    def advance(self):
        self.move()
        self.gather()

    def check(self):
        self.gather()
        self.replica()

    def replica(self):
        """What all ranks hold; checks that it is the same."""
        first, *others = self.values
        for values in others:
            assert torch.equal(values, first)
        return first.clone()

    def withheld(self):
        """Master - replica, in exact arithmetic."""
        return torch.cat(self.masters).double() - self.replica().double()


def bits(values):
    return values.view(INTEGERS[values.element_size()])

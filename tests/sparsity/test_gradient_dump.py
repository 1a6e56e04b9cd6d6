"""Gradient dumps: they are read as written, and damage is one typed error."""

import pickle

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import TrackingConfig
from megatron_sparse.errors import ConfigError, ProfileError
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.sparsity.gradient_dump import FOLDER, GradientDump, GradientDumpWriter, Kind
from megatron_sparse.transport import VirtualCluster
from tests.reduction.reducers import at_target, reducer_of


def write(folder, gradients, *, iteration=1, bucket="b", kind=Kind.GRADIENT, first_rank=0):
    """The dump of a group of ranks."""
    for rank, gradient in enumerate(gradients):
        writer = GradientDumpWriter(
            folder, [iteration], rank=rank, world_size=len(gradients), first_rank=first_rank
        )
        writer.write(bucket, iteration, kind, gradient)


def sparse_vector(numel=100, dtype=torch.float32):
    values = torch.zeros(numel, dtype=dtype)
    values[[3, 50, numel - 1]] = torch.tensor([1.5, -2.0, float("nan")], dtype=dtype)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_and_sparse_tensors_come_back_bit_for_bit(tmp_path, dtype):
    dense, sparse = torch.arange(100).to(dtype), sparse_vector(dtype=dtype)
    write(tmp_path, [dense, sparse])
    first, second = GradientDump(tmp_path).read(1, "b")
    assert torch.equal(first, dense)
    assert second.is_sparse
    assert second.dtype == dtype
    assert torch.equal(second.to_dense().nan_to_num(7), sparse.nan_to_num(7))


def test_an_embeddings_rows_come_back_flat(tmp_path):
    rows = torch.sparse_coo_tensor(
        torch.tensor([[4, 1, 4]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (60, 2)
    )
    for form in (rows, rows.to_dense().to_sparse()):
        write(tmp_path, [form])
        (found,) = GradientDump(tmp_path).read(1, "b")
        assert torch.equal(found.to_dense(), rows.to_dense().flatten())


def test_content_of_a_recording(tmp_path):
    name = "chunk0.dense/1.0 ä%"
    write(tmp_path, [sparse_vector()] * 2, iteration=20, bucket=name)
    write(tmp_path, [sparse_vector()] * 2, iteration=3, bucket=name, kind=Kind.SELECTED)
    dump = GradientDump(tmp_path)
    assert dump.iterations == [3, 20]
    assert list(dump.buckets) == [name]
    assert dump.buckets[name].world_size == 2
    assert dump.kinds(3, name) == [Kind.SELECTED]
    assert dump.kinds(20, name) == [Kind.GRADIENT]
    assert len(dump.read(3, name, Kind.SELECTED)) == 2


def test_groups_that_reduce_separately_are_distinguished(tmp_path):
    write(tmp_path, [sparse_vector(100)] * 2, first_rank=0)
    write(tmp_path, [sparse_vector(70)] * 2, first_rank=2)
    dump = GradientDump(tmp_path)
    assert list(dump.buckets) == ["group-0-2/b", "group-2-2/b"]
    assert [dump.read(1, name)[0].numel() for name in dump.buckets] == [100, 70]


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    writer = GradientDumpWriter(tmp_path / "file", [1, 2])
    for iteration in (1, 2):
        writer.write("b", iteration, Kind.GRADIENT, torch.ones(2))
    assert len(caplog.records) == 1
    assert not writer.wants(2)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, caplog):
    writer = GradientDumpWriter(tmp_path, [1, 2])
    writer.write("b", 1, Kind.GRADIENT, torch.ones(2))
    (written,) = tmp_path.rglob("b.gradient.pt")
    written.with_suffix(".partial").symlink_to("/dev/full")
    writer.write("b", 1, Kind.GRADIENT, torch.ones(2))
    assert len(caplog.records) == 1
    assert not writer.wants(2)


def test_the_configuration_says_what_is_dumped(tmp_path):
    def of(run_dir=tmp_path, **tracking):
        return GradientDumpWriter.of(TrackingConfig(**tracking), run_dir, [4, 5], 1)

    assert of(run_dir=None) is None
    both = of(record_gradients_iters=[5])
    assert both.wants(5)
    both.write("b", 5, Kind.GRADIENT, torch.ones(1))
    assert (tmp_path / FOLDER / "iteration-000005/group-4-2/rank-0001/b.gradient.pt").is_file()
    with pytest.raises(ConfigError, match="run_dir"):
        of(run_dir=None, record_gradients_iters=[5])
    with pytest.raises(ConfigError, match="record_gradients_iters"):
        TrackingConfig(record_gradients_iters=[0])


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code was run')",))


NONE = "no dumped gradient"
HELD = {"version": 1, "numel": 4, "values": torch.ones(4)}
PAIR = {"version": 1, "numel": 9, "values": torch.ones(2)}
OTHERS = (
    [1, 2],
    {"version": 99},
    HELD | {"numel": "4"},
    HELD | {"numel": 5},
    *(PAIR | {"indices": torch.tensor(i)} for i in ([1], [2, 1], [2, 2], [2, 9], [-1, 2])),
)
"""Contents of files that are no dump's."""


class TestWrongFiles:
    """Each one is a `ProfileError`."""

    @pytest.fixture
    def recorded(self, tmp_path):
        write(tmp_path, [sparse_vector()] * 2)
        return tmp_path

    def test_no_recording(self, tmp_path):
        for folder in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(ProfileError, match="no gradient dump"):
                GradientDump(folder)

    def test_a_runs_folder(self, recorded, tmp_path):
        run = tmp_path / "run"
        (run / FOLDER).mkdir(parents=True)
        (recorded / "iteration-000001").rename(run / FOLDER / "iteration-000001")
        assert GradientDump(run).iterations == [1]

    @pytest.mark.parametrize(("iteration", "bucket"), [(9, "b"), (1, "c")])
    def test_missing_tensors(self, recorded, iteration, bucket):
        with pytest.raises(ProfileError, match="does not have that"):
            GradientDump(recorded).read(iteration, bucket)

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda path: path.unlink(), "rank-0001.* is missing"),
            # Of another model.
            (lambda path: torch.save(HELD | {"numel": 4}, path), "do not fit"),
            (lambda path: path.write_bytes(b""), NONE),
            (lambda path: path.write_bytes(b"hello"), NONE),
            (lambda path: path.write_bytes(b"PK\x03\x04 half a zip"), NONE),
            (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), NONE),
            # Code is not run.
            (lambda path: path.write_bytes(pickle.dumps(HELD | {"values": Harm()})), NONE),
            *((lambda path, held=held: torch.save(held, path), NONE) for held in OTHERS),
        ],
    )
    def test_a_file_that_is_none(self, recorded, damage, says):
        damage(recorded / "iteration-000001/group-0-2/rank-0001/b.gradient.pt")
        with pytest.raises(ProfileError, match=says) as caught:
            GradientDump(recorded).read(1, "b")
        assert caught.value.expected is not None


def test_the_reducer_dumps_gradients_and_selections(tmp_path):
    """One rank, three steps: steps count from 0 and iterations from 1; the first step is dense."""
    (transport,) = VirtualCluster(1).transports
    config = at_target(scheme="agsparse", warmup_iters=1)
    progress = ProgressThread(torch.device("cpu"), 30.0)
    writer, groups = GradientDumpWriter(tmp_path, [1, 3]), Groups(transport)
    reducer = reducer_of(config, groups, progress=progress, is_reported=False, dump=writer)
    gradients = [torch.randn(8192) for _ in range(3)]
    sums = []
    for step, gradient in enumerate(gradients):
        piece = ParameterSlice("w", 0, 8192)
        bucket = Bucket("b", gradient.clone(), [piece], CollectiveOp.ALL_REDUCE, 1)
        reducer.start(bucket, step).wait()
        sums.append(bucket.grad_N)
    progress.close()
    dump = GradientDump(tmp_path)
    assert dump.iterations == [1, 3]
    assert dump.kinds(1, "b") == [Kind.GRADIENT]
    assert dump.kinds(3, "b") == [Kind.GRADIENT, Kind.SELECTED]
    for iteration in (1, 3):
        assert torch.equal(dump.read(iteration, "b")[0], gradients[iteration - 1])
    # With one rank the sum is its selection.
    (selected,) = dump.read(3, "b", Kind.SELECTED)
    assert selected.is_sparse
    assert torch.equal(selected.to_dense(), sums[2])

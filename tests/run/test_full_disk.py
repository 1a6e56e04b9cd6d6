"""A full disk is one error that names the cause and the path, last."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

from megatron_sparse.errors import StorageError
from megatron_sparse.run import full_disk, launch, preparation, rank_log, worker
from tests.run.test_resume_start import config_of

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/runs/mine/x.distcp")


def gathered() -> BaseException:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    return CheckpointException("write", {0: _wrap_exception(NO_SPACE)})


def errors() -> list[BaseException]:
    damaged = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    damaged.__context__ = NO_SPACE
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/disk/x")
    return [NO_SPACE, damaged, quota, gathered()]


def test_it_is_recognised_wherever_it_hides(tmp_path, monkeypatch):
    for error in errors():
        found = full_disk.as_storage_error(error, tmp_path)
        assert isinstance(found, StorageError), error
        assert "the disk is full: /" in str(found)
        assert "resume=must" in str(found.remedy)
    assert full_disk.as_storage_error(ValueError("another one"), tmp_path) is None
    assert list(tmp_path.iterdir()) == [], "the probe leaves nothing"
    told = RuntimeError(f"Worker failure: [Errno 28] {os.strerror(errno.ENOSPC)}\nTraceback")
    monkeypatch.setattr(full_disk.tempfile, "TemporaryFile", Mock(side_effect=NO_SPACE))
    assert isinstance(full_disk.as_storage_error(told, tmp_path), StorageError)


def test_a_rank_says_so(tmp_path, monkeypatch, capsys):
    """Also where the disk does not even take its report."""
    config = config_of(tmp_path)
    path = preparation.make_run_dir(config, "x") / preparation.CONFIG_FILE

    train = Mock(side_effect=gathered())
    monkeypatch.setattr("megatron_sparse.megatron.training.train", train)
    monkeypatch.setenv("RANK", "0")
    report = tmp_path / "error.json"
    monkeypatch.setenv(rank_log.ERROR_FILE, str(report))
    assert worker.main(path) == StorageError.exit_code
    message, typed = rank_log.read_report(json.loads(report.read_text())) or ("", False)
    assert typed
    assert "/disk/runs/mine/x.distcp" in message
    report.unlink()
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=NO_SPACE))
    assert worker.main(path) == StorageError.exit_code
    assert not report.exists(), "the agent would fail over half a report"
    assert "the disk is full" in capsys.readouterr().err


def test_the_launcher_says_so_where_no_rank_could(tmp_path, monkeypatch, capsys):
    # What torch's agent knows of a rank that left no report.
    failure = SimpleNamespace(
        message="see the log",
        exitcode=1,
        error_file=str(tmp_path / "error.json"),
        error_file_data={"message": "none"},
    )
    assert launch._report(0, failure, tmp_path) == 1
    assert "rank 0 failed: see the log" in capsys.readouterr().err
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(full_disk.tempfile, "TemporaryFile", Mock(side_effect=full))
    assert launch._report(0, failure, tmp_path) == StorageError.exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"error: the disk is full: {tmp_path}")
    assert "see the log" not in said

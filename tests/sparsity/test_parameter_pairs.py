"""Recorded parameters: read as written, complete when the next step begins, damage is one error."""

from __future__ import annotations

import doctest

import pytest
import torch

from megatron_sparse.config.sparse import TrackingConfig
from megatron_sparse.errors import ConfigError, ProfileError
from megatron_sparse.sparsity import parameter_pairs
from megatron_sparse.sparsity.parameter_pairs import FOLDER, ParameterPairWriter, read_pairs

PLACE = ("group-0-2", "dense0.0/a")


def parameters(step):
    """Two parameters of one bucket, of which one is a matrix."""
    named = [("layer.weight", torch.full((2, 3), float(step))), ("layer.bias", torch.ones(2))]
    return {PLACE: [(name, values.to(torch.bfloat16)) for name, values in named]}


def recorded(folder, steps, iterations):
    writer = ParameterPairWriter(folder, iterations)
    for step in steps:
        writer.step_begins(step, parameters(step))
    return folder


def test_a_pair_is_the_parameters_of_two_steps(tmp_path):
    folder = recorded(tmp_path / FOLDER, range(1, 6), [2, 3, 5])
    first, second = read_pairs(tmp_path)
    assert next(read_pairs(folder)).names == first.names
    assert (first.iteration, second.iteration) == (2, 3)
    assert first.bucket == PLACE[1]
    assert (first.names, first.sizes) == (("layer.weight", "layer.bias"), (6, 2))
    assert first.old_N.tolist() == [2.0] * 6 + [1.0] * 2
    assert first.new_N.tolist() == [3.0] * 6 + [1.0] * 2
    assert first.old_N.dtype == torch.bfloat16


def test_a_copy_is_kept_and_a_gap_of_steps_makes_no_pair(tmp_path):
    """After a resume the next step is another one than that after the recorded one."""
    recorded(tmp_path, [2, 9, 10], [2, 9])
    (pair,) = read_pairs(tmp_path)
    assert pair.iteration == 9
    writer, held = ParameterPairWriter(tmp_path / "held", [1]), parameters(1)
    writer.step_begins(1, held)
    held[PLACE][0][1].zero_()
    writer.step_begins(2, held)
    (pair,) = read_pairs(tmp_path / "held")
    assert pair.old_N[:6].tolist() == [1.0] * 6
    assert pair.new_N[:6].tolist() == [0.0] * 6


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parameter_pairs.torch, "save", full)
    recorded(tmp_path, range(1, 6), [1, 3])
    assert caplog.text.count("parameters are not recorded any more") == 1


def test_the_configuration_asks_for_it(tmp_path):
    assert ParameterPairWriter.of(TrackingConfig(), tmp_path) is None
    tracking = TrackingConfig(record_parameters_iters=[4])
    assert ParameterPairWriter.of(tracking, tmp_path) is not None
    with pytest.raises(ConfigError, match="needs a run's folder"):
        ParameterPairWriter.of(tracking, None)
    with pytest.raises(ConfigError, match="record_parameters_iters"):
        TrackingConfig(record_parameters_iters=[0])


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"old": torch.zeros(7)},
        {"new": "no tensor"},
        {"names": ["one"]},
        {"sizes": [6, -2]},
    ],
    ids=str,
)
def test_damage_is_one_typed_error(tmp_path, change):
    recorded(tmp_path, [1, 2], [1])
    (file,) = tmp_path.rglob("*.pt")
    torch.save(torch.load(file, weights_only=True) | change, file)
    with pytest.raises(ProfileError, match="holds no recorded parameters"):
        list(read_pairs(tmp_path))
    file.write_bytes(b"no archive")
    with pytest.raises(ProfileError, match=r"torch\.load"):
        list(read_pairs(tmp_path))


def test_an_empty_folder_is_one_typed_error(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ProfileError, match=r"tracking\.record_parameters_iters"):
            list(read_pairs(path))


def test_the_example():
    assert doctest.testmod(parameter_pairs).failed == 0

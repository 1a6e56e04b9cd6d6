"""Each compression method: against its oracle, undone, rescaled, saved; and without host reads."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.dgc import check_optimizer
from megatron_sparse.compression.methods import METHODS, method_of
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.compression.threshold_reuse import correction
from megatron_sparse.config.compression import METHODS as NAMES
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig, SparseConfig
from megatron_sparse.errors import CheckpointError, ConfigError
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.reference.dgc import dgc_step
from megatron_sparse.reference.threshold_reuse import Step, replay
from megatron_sparse.sparsity.sampling import selected_values
from tests import doc_tables
from tests.collectives.test_capacity import OnDevice

NUMEL = 6000
PIECES = (
    ParameterSlice("w0", 0, 3500),
    ParameterSlice("b", 3500, 3600, keep=True),
    ParameterSlice("w1", 3650, NUMEL),
)
"""With padding before w1."""


class Rank:
    """A selector of one rank, and its messages."""

    def __init__(self, method, *, undo=True, **options):
        self.config = CompressionConfig(
            method=method,
            samples=600,
            **({"density": 0.1, "threshold_scope": "parameter"} | options),
        )
        store = ResidualStore(torch.float32, undo=undo, outcome=Outcome.REPORTED)
        self.selector = Selector(method_of(self.config, store), 0, MessageBuffers())
        self.method = self.selector.method

    def select(self, gradient_N, step, density=None, capacity=None):
        """Sends fp32 values; leaves them pending."""
        bucket = Bucket("b", gradient_N.clone(), PIECES, CollectiveOp.ALL_REDUCE, 1)
        message = self.selector.select(
            bucket,
            MessageSpec(density or self.config.density, capacity=capacity),
            step=step,
            timer=StageTimer(),
        )
        kept = message.pruned_nnz
        return selected_values(bucket, message, self.selector.buffers).clone(), kept

    def whole(self, gradient_N, step):
        """A dense step."""
        bucket = Bucket("b", gradient_N.clone(), PIECES, CollectiveOp.ALL_REDUCE, 1)
        return self.selector.take_whole(bucket, None, step=step, timer=StageTimer()).clone()

    def commit(self):
        for store in self.method.stores.values():
            store.commit()
        self.method.commit()

    def rollback(self):
        for store in self.method.stores.values():
            store.rollback()
        self.method.rollback()

    def rescale(self, factor):
        for store in self.method.stores.values():
            store.rescale(factor)
        self.method.rescale(factor)

    def held(self):
        return {name: next(iter(store.tensors())).clone() for name, store in self.stores()}

    def stores(self):
        return [(name, store) for name, store in self.method.stores.items() if "b" in store]


def _gradient(step, seed=0):
    """Multiples of 1/8 up to 16: a few halvings and additions of them are exact in fp32."""
    draw = torch.Generator().manual_seed(100 * seed + step)
    gradient = torch.randint(-128, 129, (NUMEL,), generator=draw) / 8
    gradient[3600:3650] = 0
    return gradient


def test_the_classes_are_those_of_the_configuration():
    assert tuple(METHODS) == NAMES
    assert CompressionConfig().method == "topk"


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("scope", ["parameter", "bucket"])
def test_nothing_is_lost_and_about_the_target_is_sent(method, scope):
    rank = Rank(method, threshold_scope=scope, momentum=0.0)
    before = torch.zeros(NUMEL)
    for step in range(8):
        gradient = _gradient(step)
        sent, kept = rank.select(gradient, step)
        after = rank.held()["residual"]
        assert torch.equal(sent + after, gradient + before)
        assert torch.equal(sent[3500:3600], gradient[3500:3600]), "kept whole"
        before = after
        rank.commit()
        if rank.method.state_dict().get("b", {}).get("sampled_step", step) == step:
            # 600 samples of 10 %: 12 % off, three of which are allowed.
            assert kept / (0.1 * 5850) == pytest.approx(1, abs=0.4), step


@pytest.mark.parametrize("method", NAMES)
def test_density_one_bypasses_it(method):
    rank = Rank(method, momentum=0.0)
    rank.select(_gradient(0), 0)
    rank.commit()
    before = rank.held()["residual"]
    sent, _ = rank.select(_gradient(1), 1, density=1.0)
    assert torch.equal(sent, _gradient(1) + before)
    assert not rank.held()["residual"].any()


@pytest.mark.parametrize("method", NAMES)
def test_a_skipped_or_repeated_step_leaves_no_trace(method):
    disturbed, calm = Rank(method), Rank(method)
    for step in range(6):
        for rank in (disturbed, calm):
            rank.select(_gradient(step), step)
            rank.commit()
        if step % 2:
            # The step is begun, skipped, begun again and repeated.
            disturbed.select(_gradient(step, seed=7) * 9, step + 1)
            disturbed.rollback()
            disturbed.select(_gradient(step, seed=8) * 9, step + 1)
    assert disturbed.method.state_dict().keys() == calm.method.state_dict().keys()
    disturbed.rollback()
    for (name, one), (_, other) in zip(disturbed.held().items(), calm.held().items(), strict=True):
        assert torch.equal(one, other), name
    assert str(disturbed.method.state_dict()) == str(calm.method.state_dict())


@pytest.mark.parametrize("method", NAMES)
def test_a_restored_rank_goes_on_bit_for_bit(method):
    whole = Rank(method)
    for step in range(4):
        whole.select(_gradient(step), step)
        whole.commit()
    resumed = Rank(method)
    bucket = Bucket("b", _gradient(0), PIECES, CollectiveOp.ALL_REDUCE, 1)
    for name, store in whole.method.stores.items():
        saved = {key: view.clone() for key, view in store.slices()}
        resumed.method.stores[name].load([bucket], saved)
    resumed.method.load_state_dict(whole.method.state_dict())
    for step in range(4, 9):
        results = [rank.select(_gradient(step), step) for rank in (whole, resumed)]
        assert torch.equal(results[0][0], results[1][0]), step
        whole.commit()
        resumed.commit()
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.held().values(), resumed.held().values(), strict=True)
    )


@pytest.mark.parametrize("method", NAMES)
def test_twice_the_loss_scale_sends_twice_as_much(method):
    """A power of two changes no mantissa, so all else must be the same to the bit."""
    plain, scaled = Rank(method), Rank(method)
    for step in range(6):
        scale = 1.0 if step < 3 else 4.0
        if step == 3:
            scaled.rescale(4.0)
        one, _ = plain.select(_gradient(step), step)
        other, _ = scaled.select(_gradient(step) * scale, step)
        assert torch.equal(one * scale, other), step
        plain.commit()
        scaled.commit()


@pytest.mark.parametrize("method", NAMES)
def test_no_method_waits_for_the_device(method):
    """Both in steps that sample and in steps that do not."""
    config = CompressionConfig(method=method, density=0.1, samples=100, threshold_scope="bucket")
    store = ResidualStore(torch.float32, undo=True, outcome=Outcome.REPORTED)
    made = method_of(config, store)

    OnDevice.reads = 0
    for step in range(3):
        bucket = Bucket(
            "b", _gradient(step).as_subclass(OnDevice), PIECES, CollectiveOp.ALL_REDUCE, 1
        )
        layout = bucket.layout(sharded=False)
        residual_N = made.begin(bucket)
        for held in made.stores.values():
            held._residuals["b"] = held["b"].as_subclass(OnDevice)
        # DGC's `selecting` is in tests/cuda_emulator/test_no_waiting.py: on a CPU it may look.
        limits_R = made.limits(bucket, layout, residual_N.as_subclass(OnDevice), 0.1, step, None)
        sent = Message(torch.empty(0), layout, [], "fp32", step, 685, counted_pruned=585)
        made.selected(bucket, sent)
        made.commit()
        for held in made.stores.values():
            held.commit()
        assert {each_R.shape for each_R in limits_R} == {layout.range_piece.shape}
    assert OnDevice.reads == 0


class TestDGC:
    """Momentum correction."""

    @pytest.mark.parametrize("masking", [True, False])
    def test_it_follows_the_papers_rule_in_sparse_and_dense_steps(self, masking):
        rank = Rank("dgc", momentum=0.5, momentum_masking=masking)
        velocity, accumulated, ties = torch.zeros(NUMEL), torch.zeros(NUMEL), 0
        for step, density in enumerate((None, 0.25, 0.1, 0.1, None, 0.1, 1.0, 0.1)):
            gradient = _gradient(step)
            threshold_N = torch.full((NUMEL,), -1.0)
            if density is None:
                sent = rank.whole(gradient, step)
            else:
                sent, _ = rank.select(gradient, step, density)
                threshold_N = _spread(rank.selector.thresholds_R)
                # An element that ties with its threshold and is drawn is as good as above it.
                drawn_N = (sent != 0) & (sent.abs() == threshold_N)
                ties += int(drawn_N.sum())
                below_N = threshold_N.nextafter(torch.zeros(()))
                threshold_N = torch.where(drawn_N, below_N, threshold_N)
            expected, velocity, accumulated = dgc_step(
                gradient, velocity, accumulated, threshold_N, 0.5, masking
            )
            # Multiples of 2^-11 under 2^7: everything is exact in fp32.
            assert torch.equal(sent.double(), expected), step
            held = rank.held()
            assert torch.equal(held["momentum"].double(), velocity), step
            assert torch.equal(held["residual"].double(), accumulated), step
            if masking and density == 0.1:
                assert (velocity[:3500] == 0).sum() >= (sent[:3500] != 0).sum() > 0
            rank.commit()
        assert ties > 0 or not masking, "a tie was sent, and its velocity cleared"

    def test_dense_steps_are_sgd_with_momentum(self):
        """Megatron's own is compared in tests/megatron/test_methods_in_megatron.py."""
        rank, velocity = Rank("dgc", momentum=0.5), torch.zeros(NUMEL)
        for step in range(6):
            velocity = 0.5 * velocity + _gradient(step)
            assert torch.equal(rank.whole(_gradient(step), step), velocity)
            rank.commit()

    def test_bf16_gradients_lose_nothing(self):
        """The gradient is only read; the velocity and the residual are fp32."""
        rank = Rank("dgc", momentum=0.5)
        sent, _ = rank.select(_gradient(0).bfloat16(), 0)
        rank.commit()
        held = rank.held()
        threshold_N = _spread(rank.selector.thresholds_R)
        drawn_N = (sent != 0) & (sent.float().abs() == threshold_N)
        expected = dgc_step(
            _gradient(0).bfloat16(),
            torch.zeros(NUMEL),
            torch.zeros(NUMEL),
            torch.where(drawn_N, threshold_N.nextafter(torch.zeros(())), threshold_N),
            0.5,
            True,
        )
        assert torch.equal(held["momentum"].double(), expected[1])
        assert torch.equal(held["residual"].double(), expected[2])

    def test_nan_and_infinity_are_sent_and_forgotten(self):
        rank = Rank("dgc")
        gradient = _gradient(0)
        gradient[[5, 4000]] = torch.tensor([float("nan"), float("inf")])
        sent, _ = rank.select(gradient, 0)
        assert sent[5].isnan()
        assert sent[4000].isinf()
        assert all(tensor.isfinite().all() for tensor in rank.held().values())

    @pytest.mark.parametrize(
        ("optimizer", "word"),
        [
            (SimpleNamespace(param_groups=[{"lr": 1.0, "betas": (0.9, 0.999)}]), "SGD only"),
            (SimpleNamespace(param_groups=[{"momentum": 0}, {"momentum": 0.9}]), "momentum 0.9"),
            (SimpleNamespace(), "SGD only"),
        ],
    )
    def test_other_optimizers_are_refused(self, optimizer, word):
        """Imitates torch's and Megatron's; test_methods_in_megatron.py has the real ones."""
        with pytest.raises(ConfigError, match=word):
            check_optimizer(CompressionConfig(method="dgc"), optimizer)
        check_optimizer(CompressionConfig(), optimizer)


def _spread(thresholds_R):
    """Each element's threshold, from those of the four ranges of `PIECES`."""
    lengths = torch.tensor([3500, 100, 50, NUMEL - 3650])
    return torch.repeat_interleave(thresholds_R, lengths)


class TestThresholdReuse:
    """Against the oracle, whose samples are those that top-k takes."""

    def test_thresholds_are_the_oracles(self):
        """Gradients that grow, shrink and stay, a new density, and a step that is skipped."""
        one = (ParameterSlice("w", 0, NUMEL),)
        reused, sampled = Rank("threshold_reuse", reuse_iters=6), Rank("topk")
        growth = itertools.accumulate(
            [1, 1, 1.3, 1, 1, 1.6, 0.6, 1, 1, 1, 4, 1, 0.2, *[1] * 17], lambda a, b: a * b
        )
        steps, thresholds, taken = [], [], []
        for step, factor in enumerate(growth):
            density, counts = (0.1 if step < 20 else 0.05), step not in (14, 24)
            gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)) * factor
            buckets = [
                Bucket("b", gradient.clone(), one, CollectiveOp.ALL_REDUCE, 1) for _ in range(2)
            ]
            for rank in (reused, sampled):
                # So both use the same samples.
                if "b" in rank.method.stores["residual"]:
                    rank.method.stores["residual"]["b"].zero_()
            messages = [
                rank.selector.select(bucket, MessageSpec(density), step=step, timer=StageTimer())
                for rank, bucket in zip((reused, sampled), buckets, strict=True)
            ]
            kept = messages[0].pruned_nnz
            steps.append(Step(float(sampled.selector.thresholds_R), kept, density, counts))
            thresholds.append(float(reused.selector.thresholds_R))
            sampled.commit()
            reused.commit() if counts else reused.rollback()
            taken.append(reused.method.state_dict()["b"])
        told = replay(steps, NUMEL, 6)
        # Products of fp32 numbers, rounded once a step: six of 2^-24 at most.
        assert thresholds == pytest.approx([threshold for threshold, _ in told], rel=6 * 2**-24)
        fresh = [state["sampled_step"] == step for step, state in enumerate(taken)]
        committed = [was for (_, was), step in zip(told, steps, strict=True) if step.counts]
        assert [f for f, step in zip(fresh, steps, strict=True) if step.counts] == committed
        reasons = {was for _, was in told}
        corrected = sum(
            not was and now != before
            for (now, was), (before, _) in zip(told[1:], told, strict=False)
        )
        assert reasons == {True, False}
        assert corrected >= 2, "the story has corrections in it"
        assert sum(was for _, was in told) < len(told) / 2

    def test_a_dense_step_or_another_cut_takes_a_new_sample(self):
        rank = Rank("threshold_reuse", density=0.1)
        for step in range(2):
            rank.select(_gradient(0), step)
            rank.commit()
        rank.whole(_gradient(0), 2)
        rank.commit()
        rank.select(_gradient(0), 3)
        rank.commit()
        assert rank.method.state_dict()["b"]["sampled_step"] == 3

    def test_assumed_outcomes_count_at_once(self):
        """As with plain DDP, where nothing reports the outcome."""
        store = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
        config = CompressionConfig(method="threshold_reuse", density=0.1, samples=600)
        selector = Selector(method_of(config, store), 0, MessageBuffers())
        for step in range(4):
            bucket = Bucket("b", _gradient(0), PIECES, CollectiveOp.ALL_REDUCE, 1)
            if "b" in store:
                store["b"].zero_()
            selector.select(bucket, MessageSpec(0.1), step=step, timer=StageTimer())
        state = selector.method.state_dict()["b"]
        assert (state["sampled_step"], state["step"]) == (0, 3)

    def test_capacity_mode_counts_too(self):
        rank = Rank("threshold_reuse")
        _, kept = rank.select(_gradient(0), 0, capacity=1.5)
        rank.commit()
        assert rank.method.state_dict()["b"]["kept"] == kept > 0

    def test_ties_are_sampled_in_every_step(self):
        """What was not sent of equal gradients would all exceed the last step's threshold."""
        rank = Rank("threshold_reuse", density=0.1)
        for step in range(6):
            _, kept = rank.select(torch.full((NUMEL,), 0.5), step)
            rank.commit()
            assert rank.method.state_dict()["b"]["sampled_step"] == step
            # The draw's standard error is 23.
            assert abs(kept - 585) < 100, step

    def test_a_checkpoint_holds_the_chances_and_an_older_one_is_read(self):
        saved = Rank("threshold_reuse", density=0.1025, reuse_iters=9)
        gradient = 1 + torch.arange(NUMEL) // 30  # a few samples tie
        saved.select(gradient.float(), 0)
        saved.commit()
        state = saved.method.state_dict()
        chances = state["b"]["tie_chances"]
        assert chances[[0, 3]].min() > 0
        assert chances[[0, 3]].max() < 1
        assert chances[[1, 2]].tolist() == [0, 0], "these are kept whole"
        assert state["b"]["tied"] is False
        loaded = Rank("threshold_reuse", density=0.1025, reuse_iters=9)
        loaded.method.load_state_dict(state)
        assert torch.equal(loaded.method.state_dict()["b"]["tie_chances"], chances)

        older = {key: value for key, value in state["b"].items() if not key.startswith("tie")}
        loaded.method.load_state_dict({"b": older})
        assert not loaded.method.state_dict()["b"]["tie_chances"].any()
        loaded.select(gradient.float(), 1)
        loaded.commit()
        assert loaded.method.state_dict()["b"]["sampled_step"] == 0, "its thresholds are used"

    def test_damaged_state_is_one_error(self):
        rank = Rank("threshold_reuse")
        for state in ({"b": {"thresholds": torch.zeros(1)}}, {"b": None}):
            with pytest.raises(CheckpointError, match="thresholds are damaged"):
                rank.method.load_state_dict(state)

    @pytest.mark.parametrize(
        ("ratio", "low", "high"),
        [(1.29, 1, 1), (0.81, 1, 1), (1.31, 1.03, 1.3), (2.0, 1.1, 1.3), (0.5, 0.8, 0.9)],
    )
    def test_correction_goes_the_right_way(self, ratio, low, high):
        factor = correction(round(10_000 * ratio), 10_000.0, 0.01)
        assert factor is not None
        assert low <= factor <= high

    def test_correction_is_right_for_an_exponential_tail(self):
        """A threshold that is 5 % too low becomes the right one."""
        for density in (0.01, 0.001):
            right = torch.tensor(density).log().neg()
            kept = float((-0.95 * right).exp())
            if kept / density < 1.3:
                continue
            factor = correction(round(kept * 10**7), density * 10**7, density)
            assert factor == pytest.approx(1 / 0.95, rel=1e-3)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"method": "randomk"}, "topk | threshold_reuse | sidco | dgc"),
        ({"momentum": 1.0}, "compression.momentum <= 0.999"),
        ({"reuse_iters": 0}, "compression.reuse_iters"),
        ({"method": "dgc", "residual_dtype": "bf16"}, "residual_dtype=fp32"),
        ({"method": "sidco", "threshold_scope": "tp_group"}, "threshold_scope=parameter or bucket"),
        ({"method": "threshold_reuse", "threshold_scope": "tp_group"}, "topk or dgc"),
    ],
)
def test_what_does_not_go_together_is_one_error(section, word):
    with pytest.raises(ConfigError) as caught:
        CompressionConfig(**section)
    assert word in str(caught.value)


def test_reuse_needs_a_capacity_above_its_band():
    compression = CompressionConfig(method="threshold_reuse")
    with pytest.raises(ConfigError, match="too low"):
        SparseConfig(compression, SchemeConfig(capacity=1.25))
    wide = SparseConfig(compression, SchemeConfig(capacity=1.5))
    assert wide.scheme.capacity == 1.5


def test_the_documentation_names_tests_that_exist():
    named = [
        pair for _, pairs in doc_tables.rows_with_tests("docs/compression.md") for pair in pairs
    ]
    assert len(named) >= 6
    for path, name in named:
        assert name in doc_tables.test_functions(path), name

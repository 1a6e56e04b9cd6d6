"""`ClusterModel`: its prices, its files, the errors for wrong files, and the links of a lane."""

from dataclasses import replace

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.prices import lane_cluster
from megatron_sparse.pricing.cluster import (
    ClusterModel,
    CodecOp,
    CodecRate,
    find,
    shipped,
    shipped_file,
)
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.simulate import cluster_models
from megatron_sparse.transport import Link
from tests.commands import refusal

RATES = (
    CodecRate(CodecOp.COPY, "dense", 1.0, 1e-6, 1e-10),
    CodecRate(CodecOp.ENCODE, "coo", 0.1, 2e-6, 3e-9),
    CodecRate(CodecOp.ENCODE, "coo", 0.01, 1e-6, 1e-9),
)
CLUSTER = ClusterModel(
    name="lab",
    device="cpu",
    nodes=(2, 2),
    nic="node",
    intra=Link(1e-6, 1e-11),
    inter=Link(1e-5, 1e-9),
    dense=Link(0.1 + 0.2, 7e-300),
    host_s_per_message=2e-6,
    host_s_per_bucket=1 / 3,
    codec=RATES,
    ring_densities={"coo": (0.1, 0.2, 0.3)},
    fingerprint={"processor": 'a "b" c: 1', "torch": "2.13"},
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lab.yaml"
    CLUSTER.save(path, "megatron-sparse calibrate\nsecond line")
    return path


class TestFile:
    """YAML and back."""

    def test_numbers_and_texts_are_kept_in_full(self, path):
        assert path.read_text().startswith("# megatron-sparse calibrate\n# second line\n")
        assert ClusterModel.load(path) == CLUSTER

    @pytest.mark.parametrize(
        ("before", "after", "words"),
        [
            ("alpha_s: 1.0e-05", "alpha_s: -1.0e-05", ["inter.alpha_s", "-1e-05"]),
            (
                "seconds_per_element: 3.0e-09",
                "seconds_per_element: fast",
                ["codec[1].seconds_per_element", "fast"],
            ),
            (
                "seconds_per_element: 3.0e-09",
                "seconds_per_element: -1.0",
                ["codec[1].seconds_per_element", "-1.0"],
            ),
            ("seconds_per_element: 3.0e-09", "seconds_per_element: 1e300", ["<= 3600", "1e+300"]),
            ("density: 0.1", "density: 0", ["codec[1].density"]),
            ("density: 0.01,", "density: 0.1,", ["encode coo at density 0.1 more than once"]),
            ("op: copy", "op: copies", ["codec[0].op", "decode_add", "copies"]),
            ("format: coo", "format: zip", ["codec[1].format", "pici", "zip"]),
            ("density: 1.0, ", "", ["codec[0]", "lacks", "density"]),
            ("nic: ", "nick: ", ["lacks 'nic'"]),
            (
                "host_s_per_message: ",
                "host_speed: 1\nhost_s_per_message: ",
                ["unknown key 'host_speed'"],
            ),
            ("nodes: [2, 2]", "nodes: [2, 0]", ["nodes[1]"]),
            ("nodes: [2, 2]", "nodes: 2", ["nodes", "a list"]),
            ("[0.1, 0.2, 0.3]", "[0.1, 0.2]", ["ring_densities.coo", "intra, inter, gather"]),
            ("device: cpu", "device: tpu", ["device", "cpu | cuda"]),
            ("inter: {", "inter: [] # {", ["inter"]),
        ],
    )
    def test_a_wrong_value_is_one_error_that_names_the_key(self, path, before, after, words):
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
        said = refusal(ClusterModel.load, path)
        for word in ["lab.yaml", "remedy:", *words]:
            assert word in said

    def test_a_cut_file_is_found_wherever_it_ends(self, path):
        lines = path.read_text().splitlines(keepends=True)
        for kept in range(len(lines)):
            path.write_text("".join(lines[:kept]))
            with pytest.raises(ConfigError, match=r"lab\.yaml"):
                ClusterModel.load(path)

    @pytest.mark.parametrize(
        "text",
        # The last one would run code.
        ["", "[1, 2", "- 1\n", "a: b: c", "\x00\x01", "!!python/object/apply:os.getcwd []\n"],
    )
    def test_no_yaml_of_a_cluster(self, path, text):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            ClusterModel.load(path)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(ConfigError, match="perlmutter"):
            find(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            ClusterModel.load(tmp_path / "none.yaml")

    def test_a_place_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            CLUSTER.save(tmp_path / "file" / "lab.yaml", "")


class TestAnswers:
    """The queries of cost models."""

    @pytest.mark.parametrize(
        ("density", "seconds"),
        # Measured at 1 and 10 %; half-way: 1.5 us a call and 2 ns an element; beyond, the nearest.
        [(0.01, 2e-6), (0.1, 5e-6), (0.055, 3.5e-6), (1e-6, 2e-6), (0.9, 5e-6)],
    )
    def test_between_measured_densities_it_is_linear(self, density, seconds):
        found = CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, density)
        assert found == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("ns_of", "expected_ns"),
        [
            # Pairs that become a bitmap, at 5 %, are not mixed with it.
            (
                {0.01: 2, 0.02: 3, 0.05: 20, 0.1: 30},
                {0.015: 2.5, 0.03: 4.0, 0.04: 18.0, 0.075: 25.0, 0.5: 30.0},
            ),
            # With one density of a form all are on one line.
            ({0.01: 2, 0.05: 20}, {0.03: 11.0}),
        ],
    )
    def test_pairs(self, ns_of, expected_ns):
        """Nanoseconds an element by density."""
        rates = tuple(
            CodecRate(CodecOp.ENCODE, "pairs", density, 0.0, ns * 1e-9)
            for density, ns in ns_of.items()
        )
        cluster = replace(CLUSTER, codec=rates)
        for density, ns in expected_ns.items():
            found = cluster.codec_s(CodecOp.ENCODE, "pairs", 1000, density)
            assert found == pytest.approx(ns * 1e-6)

    def test_nothing_takes_no_time(self):
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 0, 0.1) == 0

    def test_copies_take_half_as_long_for_half_the_bytes(self):
        assert CLUSTER.codec_s(CodecOp.COPY, "dense", 10**6, 1.0, 2) == pytest.approx(51e-6)
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 10**6, 0.1, 2) == pytest.approx(3002e-6)

    def test_what_was_not_measured(self):
        with pytest.raises(ConfigError, match=r"(?s)select pici.*encode coo.*calibrate"):
            CLUSTER.codec_s(CodecOp.SELECT, "pici", 10, 0.1)

    @pytest.mark.parametrize(
        ("nodes", "world_size", "expected"),
        [
            ((2, 2), 4, (2, 2)),
            ((3, 1), 4, (3, 1)),
            ((2, 2), 5, (2, 2, 1)),
            ((2, 2), 1, (1,)),
            ((4,), 6, (6,)),
            ((1, 1), 3, (1, 1, 1)),
        ],
    )
    def test_topology(self, nodes, world_size, expected):
        topology = replace(CLUSTER, nodes=nodes).topology(world_size)
        assert topology.node_sizes == expected
        assert (topology.intra, topology.inter) == (CLUSTER.intra, CLUSTER.inter)
        assert topology.nic == "node"

    def test_the_backends_ring_within_one_of_several_nodes_runs_at_its_links(self):
        assert CLUSTER.dense_link(2) == CLUSTER.intra
        assert CLUSTER.dense_link(4) == CLUSTER.dense
        assert replace(CLUSTER, nodes=(2,)).dense_link(2) == CLUSTER.dense

    def test_another_cluster_is_refused_by_the_field_that_differs(self):
        CLUSTER.check_fingerprint(CLUSTER.fingerprint)
        with pytest.raises(ConfigError, match=r"(?s)its torch .*expected: 2\.14.*got: +2\.13"):
            CLUSTER.check_fingerprint(CLUSTER.fingerprint | {"torch": "2.14"})
        with pytest.raises(ConfigError, match="its torch"):
            CLUSTER.check_fingerprint({"processor": CLUSTER.fingerprint["processor"]})
        replace(CLUSTER, fingerprint={}).check_fingerprint({"torch": "2.14"})


class TestShipped:
    """The model clusters."""

    def test_they_are_those_of_the_papers(self):
        assert shipped() == sorted(cluster_models.MACHINES)

    @pytest.mark.parametrize("name", sorted(cluster_models.MACHINES))
    def test_links_are_those_of_the_machines(self, name):
        model, (machine, nodes) = find(name), cluster_models.MACHINES[name]
        assert model.is_model
        assert model.name == name
        assert model.inter == model.dense == machine.inter
        assert model.topology(8).node_sizes == machine.topology(8).node_sizes
        assert model.topology(8).nic == machine.nic
        if machine.ranks_per_node > 1:
            assert model.intra == machine.intra
        assert len(model.nodes) == nodes

    def test_the_files_equal_those_made_from_the_machines(self):
        """Computed again for one; the others' rates differ by that of the memory.

        Tolerance: 1 %, and 1 ns a call, for a tensor operation more or less in the codec's Python.
        """
        made = cluster_models.model("perlmutter")
        for name, (machine, _) in cluster_models.MACHINES.items():
            head = [f"# {line}" for line in cluster_models.comment(name).splitlines()]
            assert shipped_file(name).read_text().splitlines()[: len(head)] == head
            factor = cluster_models.MACHINES["perlmutter"][0].codec_rate / machine.codec_rate
            for rate, anew in zip(find(name).codec, made.codec, strict=True):
                assert (rate.op, rate.format, rate.density) == (anew.op, anew.format, anew.density)
                assert rate.seconds_per_element == pytest.approx(
                    anew.seconds_per_element * factor, rel=0.01
                ), "python -m megatron_sparse.simulate.cluster_models writes the files anew"
                assert rate.seconds_per_call == pytest.approx(
                    anew.seconds_per_call * factor, rel=0.01, abs=1e-9
                )


CARD = find("perlmutter")
"""Nodes of 4 ranks that share a card."""
OWN = replace(CARD, nic="rank")
"""A card for each rank."""


@pytest.mark.parametrize(
    ("cluster", "inside", "ranks", "a_node", "sharing"),
    [
        (CARD, 4, 8, 1, 4),
        (OWN, 4, 8, 1, 1),
        # Eight lanes of instances of two nodes, of which four begin on each node.
        (CARD, 8, 4, 1, 4),
        # Instances of half a node have two ranks of a lane on a node.
        (CARD, 2, 8, 2, 2),
    ],
)
def test_lanes_share_the_card_of_their_nodes(cluster, inside, ranks, a_node, sharing):
    lane = lane_cluster(cluster, inside, ranks)
    assert lane.topology(ranks).node_sizes == (a_node,) * (ranks // a_node)
    assert lane.inter == Link(CARD.inter.alpha_s, sharing * CARD.inter.beta_s)
    assert lane.dense_link(ranks) == Link(CARD.dense.alpha_s, sharing * CARD.dense.beta_s)


def test_the_backend_is_never_faster_than_the_lane():
    striped = replace(OWN, dense=Link(1e-6, CARD.inter.beta_s / 4))
    assert lane_cluster(striped, 4, 8).dense.beta_s == CARD.inter.beta_s


def test_an_instance_that_cuts_a_node_has_no_price():
    with pytest.raises(ConfigError, match="has no price"):
        lane_cluster(CARD, 6, 4)


def test_a_part_has_the_elements_and_ranks_of_a_lane():
    part = BucketShape(1001, 10, 4, CollectiveOp.ALL_REDUCE, 8, value_bits=4).lane(4)
    assert (part.numel, part.kept_numel, part.world_size, part.lanes) == (251, 3, 2, 4)
    assert part.value_bits == 4


def test_a_shape_has_a_lane_at_least():
    with pytest.raises(ConfigError, match=r"shape\.lanes"):
        BucketShape(8, 0, 4, CollectiveOp.ALL_REDUCE, 2, lanes=0)

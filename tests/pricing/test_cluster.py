"""`ClusterModel`: its prices, its files, and the errors for wrong files."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing import cluster as cluster_files
from megatron_sparse.pricing.cluster import (
    ESTIMATES,
    ClusterModel,
    CodecOp,
    CodecRate,
    find,
    shipped,
)
from megatron_sparse.simulate import cluster_models
from megatron_sparse.transport import Link
from tests.commands import run

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
    dense=Link(2e-5, 1.5e-9),
    host_s_per_message=2e-6,
    host_s_per_bucket=1e-4,
    codec=RATES,
    ring_densities={"coo": (0.1, 0.2, 0.3)},
    fingerprint={"processor": 'a "b" c: 1', "torch": "2.13"},
)


@pytest.fixture
def path(tmp_path):
    """A file that is right."""
    path = tmp_path / "lab.yaml"
    CLUSTER.save(path, "megatron-sparse calibrate\nsecond line")
    return path


class TestFile:
    """YAML and back."""

    def test_round_trip(self, path):
        assert ClusterModel.load(path) == CLUSTER
        assert path.read_text().startswith("# megatron-sparse calibrate\n# second line\n")

    def test_numbers_are_kept_in_full(self, path):
        odd = replace(CLUSTER, host_s_per_bucket=1 / 3, inter=Link(0.1 + 0.2, 7e-300))
        odd.save(path, "")
        assert ClusterModel.load(path) == odd

    @pytest.mark.parametrize(
        ("before", "after", "words"),
        [
            ("alpha_s: 1e-05", "alpha_s: -1e-05", ["inter.alpha_s", "-1e-05"]),
            (
                "seconds_per_element: 3e-09",
                "seconds_per_element: -1.0",
                ["codec[1].seconds_per_element", "-1.0"],
            ),
            (
                "seconds_per_element: 3e-09",
                "seconds_per_element: fast",
                ["codec[1].seconds_per_element", "fast"],
            ),
            ("density: 0.1", "density: 0", ["codec[1].density"]),
            ('op: "copy"', 'op: "copies"', ["codec[0].op", "decode_add", "copies"]),
            ('format: "coo"', 'format: "zip"', ["codec[1].format", "pici", "zip"]),
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
            ('device: "cpu"', 'device: "tpu"', ["device", "cpu | cuda"]),
            ("inter: {", "inter: [] # {", ["inter"]),
        ],
    )
    def test_a_wrong_value_is_one_error_that_names_the_key(self, path, before, after, words):
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(ConfigError) as caught:
            ClusterModel.load(path)
        for word in ["lab.yaml", "expected:", "got:", "remedy:", *words]:
            assert word in str(caught.value)

    def test_a_cut_file_is_found_wherever_it_ends(self, path):
        lines = path.read_text().splitlines(keepends=True)
        for kept in range(len(lines)):
            path.write_text("".join(lines[:kept]))
            with pytest.raises(ConfigError, match=r"lab\.yaml"):
                ClusterModel.load(path)

    @pytest.mark.parametrize("text", ["", "[1, 2", "- 1\n", "a: b: c", "\x00\x01"])
    def test_no_yaml_of_a_cluster(self, path, text):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            ClusterModel.load(path)

    def test_yaml_that_would_run_code_is_refused(self, path):
        path.write_text("!!python/object/apply:os.getcwd []\n")
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

    def test_measured_densities(self):
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, 0.01) == pytest.approx(2e-6)
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, 0.1) == pytest.approx(5e-6)

    def test_between_them_it_is_linear(self):
        """Half-way: 1.5 us a call and 2 ns an element."""
        found = CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, 0.055)
        assert found == pytest.approx(3.5e-6)

    def test_beyond_them_the_nearest_counts(self):
        for beyond, nearest in ((1e-6, 0.01), (0.9, 0.1)):
            found = CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, beyond)
            assert found == CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, nearest)

    def test_pairs_that_become_a_bitmap_are_not_mixed_with_it(self):
        """Pairs: 2 and 3 ns an element at 1 and 2 %; a bitmap: 20 and 30 ns at 5 and 10 %."""
        rates = tuple(
            CodecRate(CodecOp.ENCODE, "pairs", density, 0.0, ns * 1e-9)
            for density, ns in ((0.01, 2), (0.02, 3), (0.05, 20), (0.1, 30))
        )
        cluster = dataclasses.replace(CLUSTER, codec=rates)
        for density, ns in ((0.015, 2.5), (0.03, 4.0), (0.04, 18.0), (0.075, 25.0), (0.5, 30.0)):
            found = cluster.codec_s(CodecOp.ENCODE, "pairs", 1000, density)
            assert found == pytest.approx(ns * 1e-6)

    def test_with_one_density_of_a_form_all_are_on_one_line(self):
        rates = tuple(
            CodecRate(CodecOp.ENCODE, "pairs", density, 0.0, ns * 1e-9)
            for density, ns in ((0.01, 2), (0.05, 20))
        )
        cluster = dataclasses.replace(CLUSTER, codec=rates)
        found = cluster.codec_s(CodecOp.ENCODE, "pairs", 1000, 0.03)
        assert found == pytest.approx(11e-6)

    def test_nothing_takes_no_time(self):
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 0, 0.1) == 0

    def test_copies_take_half_as_long_for_half_the_bytes(self):
        assert CLUSTER.codec_s(CodecOp.COPY, "dense", 10**6, 1.0, 2) == pytest.approx(51e-6)
        assert CLUSTER.codec_s(CodecOp.ENCODE, "coo", 10**6, 0.1, 2) == pytest.approx(3002e-6)

    def test_rice_is_estimated_where_it_was_not_measured(self):
        """A file of an older version, or a model, has none of its rates."""
        assert CLUSTER.estimates_rice
        for name, (like, factor) in ESTIMATES.items():
            if like == "coo":
                found = CLUSTER.codec_s(CodecOp.ENCODE, name, 1000, 0.1)
                assert found == factor * CLUSTER.codec_s(CodecOp.ENCODE, "coo", 1000, 0.1)
        own = CodecRate(CodecOp.ENCODE, "rice", 0.1, 0.0, 7e-9)
        measured = dataclasses.replace(CLUSTER, codec=(*RATES, own))
        assert not measured.estimates_rice
        assert measured.codec_s(CodecOp.ENCODE, "rice", 1000, 0.1) == pytest.approx(7e-6)

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
            assert cluster_models.path_of(name).read_text().splitlines()[: len(head)] == head
            factor = cluster_models.MACHINES["perlmutter"][0].codec_rate / machine.codec_rate
            for rate, anew in zip(find(name).codec, made.codec, strict=True):
                assert (rate.op, rate.format, rate.density) == (anew.op, anew.format, anew.density)
                assert rate.seconds_per_element == pytest.approx(
                    anew.seconds_per_element * factor, rel=0.01
                ), "python -m megatron_sparse.simulate.cluster_models writes the files anew"
                assert rate.seconds_per_call == pytest.approx(
                    anew.seconds_per_call * factor, rel=0.01, abs=1e-9
                )

    def test_every_call_of_a_collective_has_a_rate(self):
        model = find("perlmutter")
        for op in (CodecOp.SELECT, CodecOp.ENCODE, CodecOp.DECODE, CodecOp.DECODE_ADD):
            for form in ("dense", "coo", "pici", "blocks"):
                assert model.codec_s(op, form, 2**20, 0.03) > 0
        for op, form in (
            (CodecOp.ADD, "dense"),
            (CodecOp.COPY, "dense"),
            (CodecOp.PARTITION, "pairs"),
            (CodecOp.ENCODE, "pairs"),
            (CodecOp.DECODE_ADD, "pairs"),
            (CodecOp.ENCODE, "hash_bitmap"),
            (CodecOp.DECODE_ADD, "hash_bitmap"),
        ):
            assert model.codec_s(op, form, 2**20, 0.03) > 0

    def test_fields_are_documented(self):
        for kind in (ClusterModel, CodecRate):
            for field in dataclasses.fields(kind):
                assert f"{field.name}:" in (kind.__doc__ or "")


class TestCommandLine:
    """Mistakes are one message."""

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (["--ranks", "1"], "one rank has no links"),
            (["--virtual"], "--virtual does not fit"),
            (["--sweep", "--virtual"], "--virtual does not fit"),
            (["--cluster", "perlmutter"], "--virtual does not fit"),
            (["--sweep", "--virtual", "--cluster", "nowhere"], "there is no cluster 'nowhere'"),
            (["--sweep", "--format", "zip"], "--format"),
            (["--sweep", "--density", "2"], "--density"),
            (["--timeout", "0"], "--timeout"),
            (["--netbed"], "--netbed"),
        ],
    )
    def test_flags_that_do_not_fit(self, tmp_path, monkeypatch, capsys, arguments, word):
        monkeypatch.chdir(tmp_path)
        assert run("calibrate", *arguments) == 2
        told = capsys.readouterr().err
        assert told.count("error:") == 1
        assert word in told
        assert list(tmp_path.iterdir()) == []

    def test_an_existing_file_is_not_replaced(self, path, capsys):
        before = path.read_text()
        assert run("calibrate --output", path) == 2
        assert "--force" in capsys.readouterr().err
        assert path.read_text() == before

    def test_a_sweep_does_not_add_to_a_damaged_file(self, path, capsys):
        path.write_text("nodes: [1")
        assert run("calibrate --sweep --output", path) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_folder_is_package_data():
    """`configs` is a package whose YAML files are installed at any depth."""
    assert cluster_models.path_of("perlmutter").parent.name == cluster_files.FOLDER

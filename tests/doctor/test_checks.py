"""The doctor: it always answers, and every problem comes with a remedy."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_sparse.doctor import checks as doctor
from megatron_sparse.doctor.checks import Check
from megatron_sparse.megatron.host_symbols import NEWEST_TESTED, UPGRADE, HostSymbol
from tests.commands import stand_in


def looked(look: object) -> dict[str, Check]:
    """The checks of one check function, by name."""
    return {check.name: check for check in look()}  # type: ignore[operator]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table without wrapped cells, so tests can search for texts."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """Replaces all check functions by one that yields the checks in the returned list."""
    checks: list[Check] = []
    monkeypatch.setattr(doctor, "_PART_CHECKS", (lambda: iter(checks),))
    return checks


def test_this_machine_gets_every_line() -> None:
    checks = doctor.collect()
    names = {check.name for check in checks}
    assert names >= {
        "Python",
        "torch",
        "Triton",
        "megatron-core",
        "Megatron functions for attach",
        "Hydra",
        "tokenizers",
        "W&B",
        "C++ compiler",
        "nvcc",
        "gloo",
        "NCCL",
        "GLOO_SOCKET_IFNAME",
    }
    for check in checks:
        assert check.status in ("ok", "warn", "fail")
        assert check.detail
        assert check.status == "ok" or check.remedy, f"{check.name} leaves the reader alone"


def test_check_that_raises_is_a_failed_line_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def _half_installed() -> Iterator[Check]:
        yield Check("first", "ok", "seen before it broke")
        raise OSError("libsomething.so: cannot open\nwith more lines")

    def _quits() -> Iterator[Check]:
        raise SystemExit("package that exits at import")
        yield

    monkeypatch.setattr(
        doctor,
        "_PART_CHECKS",
        (_half_installed, _quits, lambda: iter([Check("last", "ok", "there")])),
    )
    first, broken, quit_, last = doctor.collect()
    assert (first.name, last.name) == ("first", "last")
    assert (broken.name, broken.status) == ("half installed", "fail")
    assert broken.detail == "OSError: libsomething.so: cannot open"
    assert quit_.status == "fail"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [((), 0), (("ok", "warn"), 0), (("ok", "fail"), 1), (("fail", "warn", "fail"), 1)],
)
def test_exit_code_and_json(
    only_fakes: list[Check], tmp_path: Path, statuses: tuple[doctor.Status, ...], code: int
) -> None:
    only_fakes += [Check(f"part {i}", s, f"found {i}", "do") for i, s in enumerate(statuses)]
    assert doctor.run(tmp_path / "report.jsonl") == code
    lines = (tmp_path / "report.jsonl").read_text().splitlines()
    assert [Check(**json.loads(line)) for line in lines] == only_fakes


def test_table_shows_brackets_as_they_are(
    only_fakes: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    only_fakes.append(Check("part", "fail", "found [red]x[/red]", doctor.TRAIN_EXTRA))
    assert doctor.run() == 1
    printed = capsys.readouterr().out
    assert "megatron-sparse[train]" in printed
    assert "found [red]x[/red]" in printed
    assert "0 ok, 0 warn, 1 fail" in printed


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.9.1+cu128")
    assert looked(doctor._torch)["torch"].status == "fail", "2.9 is older than 2.11"
    monkeypatch.setattr("torch.__version__", "2.11.0a0+git123")
    assert looked(doctor._torch)["torch"].status == "ok"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    for look, name, status in (
        (doctor._megatron, "megatron-core", "fail"),
        (doctor._packages, "Hydra", "fail"),
        (doctor._packages, "tokenizers", "fail"),
        (doctor._packages, "Triton", "warn"),
        (doctor._wandb, "W&B", "warn"),
    ):
        check = looked(look)[name]
        assert (check.status, "pip install" in check.remedy) == (status, True)


def test_a_megatron_that_is_not_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(doctor._megatron)["megatron-core"].status == "ok"
    monkeypatch.setattr("megatron.core.__version__", "0.20.0")
    check = looked(doctor._megatron)["megatron-core"]
    assert check.status == "warn"
    assert check.detail == f"0.20.0 is not tested: newest tested is {NEWEST_TESTED}"
    assert f"pip install megatron-core=={NEWEST_TESTED}" in check.remedy


def test_missing_host_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = [
        HostSymbol("attach", "m.Group.start_grad_sync", None),
        HostSymbol("attach", "m.Group.finish_grad_sync", "without self"),
        HostSymbol("install", "m.train_step", None),
    ]
    monkeypatch.setattr("megatron_sparse.megatron.host_symbols.find_host_symbols", lambda: symbols)
    found = looked(doctor._megatron)
    assert found["Megatron functions for attach"] == Check(
        "Megatron functions for attach", "fail", "m.Group.finish_grad_sync: without self", UPGRADE
    )
    assert found["Megatron functions for install"] == Check(
        "Megatron functions for install", "ok", "train_step"
    )


LOADED = {"built": True, "loaded": True, "reason": ""}
UNLOADABLE = LOADED | {"loaded": False, "reason": "no symbol"}
MISSING = {"built": False, "loaded": False, "reason": "no compiler here"}
USELESS = ": the plugin cannot run on this GPU"


@pytest.mark.parametrize(
    ("gpu", "part", "state", "compiles", "status", "detail"),
    [
        (False, "cpu", LOADED, "", "ok", "loaded from ops.so"),
        (False, "cpu", MISSING, "", "warn", "no compiler here"),
        (False, "cpu", MISSING, "takes minutes", "warn", "no compiler here; takes minutes"),
        (False, "cuda", MISSING, "", "ok", "not built; this machine has no GPU to run it on"),
        (True, "cuda", MISSING, "", "fail", f"no compiler here{USELESS}"),
        (True, "cuda", UNLOADABLE, "", "fail", f"no symbol{USELESS}"),
    ],
)
def test_extension_matters_where_it_could_run(
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    part: str,
    state: dict[str, object],
    compiles: str,
    status: doctor.Status,
    detail: str,
) -> None:
    stub = SimpleNamespace(
        status=lambda: {part: state | {"path": "ops.so"}}, compiles_first=lambda part: compiles
    )
    monkeypatch.setitem(sys.modules, "megatron_sparse.cuda_ext", stub)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    remedy = "megatron-sparse build" if status != "ok" else ""
    name = f"extension, {part}"
    assert looked(doctor._extension) == {name: Check(name, status, detail, remedy)}


@pytest.mark.parametrize(("major", "status"), [(9, "ok"), (12, "fail")])
def test_a_gpu_that_no_kernel_is_compiled_for_fails(
    monkeypatch: pytest.MonkeyPatch, major: int, status: doctor.Status
) -> None:
    gpu = SimpleNamespace(name="GPU", total_memory=2**37, major=major, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (major, 0))
    check = looked(doctor._gpus)["GPU 0"]
    assert check.status == status
    assert ("MEGATRON_SPARSE_CUDA_ARCHS" in check.remedy) == (status == "fail")


class TestTheTable:
    """Remedies can be copied from every kind of output."""

    REMEDY = "pip install 'megatron-sparse[train]' " + "x" * 120

    @pytest.fixture
    def shown(self, only_fakes, monkeypatch, capsys):
        only_fakes.append(Check("part", "warn", "not installed: " * 8, self.REMEDY))

        def run(columns: str | None) -> str:
            monkeypatch.delenv("COLUMNS")
            if columns is not None:
                monkeypatch.setenv("COLUMNS", columns)
            assert doctor.run() == 0
            return capsys.readouterr().out

        return run

    def test_a_pipe_gets_each_remedy_on_one_line(self, shown):
        assert any(self.REMEDY in line for line in shown(None).splitlines())

    def test_a_narrow_terminal_gets_all_of_it_on_several(self, shown):
        output = shown("80")
        assert max(map(len, output.splitlines())) <= 80
        assert "…" not in output
        assert output.count("x") >= 120


def test_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert looked(doctor._network)["GLOO_SOCKET_IFNAME"].status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch7")
    check = looked(doctor._network)["GLOO_SOCKET_IFNAME"]
    assert check.status == "fail"
    assert "nosuch7" in check.detail
    assert "lo" in check.remedy


def test_nvcc_of_cuda_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = stand_in(tmp_path / "bin" / "nvcc", "printf 'nvcc: NVIDIA\\nBuild cuda_99.1\\n'")
    for name in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert looked(doctor._nvcc)["nvcc"] == Check("nvcc", "ok", f"Build cuda_99.1 ({nvcc})")


def test_compiler_named_in_cxx_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = looked(doctor._compiler)["C++ compiler"]
    assert check.status == "warn"
    assert "no-such-compiler" in check.detail
    assert "g++" in check.remedy

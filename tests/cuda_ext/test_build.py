"""The build: its libraries, when it builds again, and its errors."""

import shutil
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_sparse import cuda_ext
from megatron_sparse.cuda_ext import build, ptxas, sources, toolchain
from megatron_sparse.errors import DependencyError, ExtensionError
from tests.commands import stand_in
from tests.cuda_ext.test_cuda_codecs import needs_nvcc
from tests.programs import ended, with_variables


def command(*arguments, **environment):
    words = [sys.executable, "-m", "megatron_sparse.cuda_ext.build", *map(str, arguments)]
    return ended(words, None, env=with_variables(**environment))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """An environment whose PATH is empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_status_of_the_libraries_built_here():
    cuda_ext.load()
    found = cuda_ext.status()
    assert found["cpu"]["built"]
    assert found["cpu"]["loaded"]
    assert found["cpu"]["reason"] == ""
    assert set(found) == {"cpu", "cuda"}
    assert set(found["cuda"]) == {"path", "built", "loaded", "reason"}


class TestWhatIsCompiledFirst:
    """Whoever waits for it is told before."""

    @pytest.fixture
    def nothing_built(self, monkeypatch):
        monkeypatch.setattr(sources, "is_current", lambda part: False)
        monkeypatch.setattr(toolchain, "find_cxx", lambda: "g++")
        monkeypatch.setattr(toolchain, "find_cuda", lambda: None)

    def test_it_is_said_where_it_can_be_compiled(self, nothing_built):
        said = "the native libraries (cpu, cuda) are compiled at the first start, once"
        assert cuda_ext.compiles_first("cpu", "cuda").startswith(said)
        assert cuda_ext.compiles_first("cpu").startswith("the native library (cpu) is compiled")

    def test_without_nvcc(self, nothing_built, monkeypatch):
        monkeypatch.setattr(toolchain, "find_cuda", _no_cuda)
        assert "(cpu)" in cuda_ext.compiles_first("cpu", "cuda")

    def test_without_a_compiler(self, monkeypatch, no_compiler):
        monkeypatch.setattr(sources, "is_current", lambda part: False)
        assert cuda_ext.compiles_first("cpu", "cuda") == ""

    def test_what_is_built_is_not_mentioned(self, monkeypatch):
        monkeypatch.setattr(sources, "is_current", lambda part: True)
        assert cuda_ext.compiles_first("cpu", "cuda") == ""

    @pytest.mark.parametrize(("rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
    def test_one_rank_says_it_where_it_compiles(
        self, nothing_built, monkeypatch, caplog, rank, times
    ):
        built = []
        monkeypatch.setattr(build, "build", lambda cuda, parts: built.append(parts))
        if rank is None:
            monkeypatch.delenv("RANK", raising=False)
        else:
            monkeypatch.setenv("RANK", rank)
        cuda_ext._build_if_needed("cpu")
        assert built == [("cpu",)]
        assert caplog.text.count("this takes minutes") == times


def test_no_compiler_is_one_message_on_the_command_line(tmp_path):
    done = command("--out", tmp_path / "lib", PATH=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no C++ compiler")
    assert "got:      CXX=no-such-compiler" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr


def test_install_goes_on_without_a_compiler_unless_strict(no_compiler, monkeypatch, tmp_path):
    monkeypatch.delenv(build.STRICT, raising=False)
    monkeypatch.delenv("MEGATRON_SPARSE_CUDA", raising=False)
    monkeypatch.setattr(build, "find_cuda", _no_cuda)
    parts = build.build_for_install(tmp_path / "lib")
    assert [(p.name, p.state) for p in parts] == [("cpu", "left out"), ("cuda", "left out")]
    assert "the first use builds it" in str(parts[0])
    monkeypatch.setenv(build.STRICT, "1")
    with pytest.raises(DependencyError):
        build.build_for_install(tmp_path / "lib")


def _no_cuda():
    raise DependencyError("there is no nvcc", remedy="install it")


def test_a_missing_nvcc_is_an_error_only_where_cuda_is_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "find_cuda", _no_cuda)
    monkeypatch.delenv(build.STRICT, raising=False)
    (part,) = build.build("auto", tmp_path, parts=("cuda",))
    assert part.state == "left out"
    assert "no nvcc" in part.reason
    with pytest.raises(DependencyError):
        build.build("on", tmp_path, parts=("cuda",))
    monkeypatch.setenv(build.STRICT, "1")
    with pytest.raises(DependencyError):
        build.build("auto", tmp_path, parts=("cuda",))


def test_a_compiler_error_names_the_command(monkeypatch, tmp_path):
    broken = tmp_path / "csrc"
    shutil.copytree(sources.SOURCES, broken)
    (broken / "isa.cpp").write_text("this is not C++;\n")
    monkeypatch.setattr(sources, "SOURCES", broken)
    monkeypatch.setattr(sources, "CPU_BINDINGS", [broken / "isa.cpp"])
    monkeypatch.setattr(sources, "ISAS", {})
    with pytest.raises(ExtensionError, match="failed with exit code 1") as caught:
        build.build("off", tmp_path / "lib")
    assert "isa.cpp" in str(caught.value.expected)
    assert "error" in str(caught.value.got)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExtensionError, match="cannot be written"):
        build.build("off", tmp_path / "file" / "lib")


def test_concurrent_builds_build_once_and_a_changed_source_builds_again(monkeypatch, tmp_path):
    csrc, out = tmp_path / "csrc", tmp_path / "lib"
    shutil.copytree(sources.SOURCES, csrc)
    monkeypatch.setattr(sources, "SOURCES", csrc)
    links = []

    def fake_run(words, verbose):
        if "-shared" in words:
            links.append(words)
        Path(words[list(words).index("-o") + 1]).write_bytes(b"library")
        return ""

    monkeypatch.setattr(build, "run", fake_run)
    threads = [threading.Thread(target=build.build, args=("off", out)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(links) == 1
    assert sources.is_current("cpu", out)
    (csrc / "isa.cpp").write_text("// changed\n")
    assert not sources.is_current("cpu", out)
    (part, _) = build.build("off", out)
    assert part.state == "built"
    assert build.build("off", out)[0].state == "up to date"
    # Another torch: the stable ABI lets the library load, so one built elsewhere can be carried.
    monkeypatch.setattr(build, "find_torch", lambda: (tmp_path, "2.99.0"))
    assert build.build("off", out)[0].state == "up to date"


def test_hosts_without_a_common_lock_do_not_write_to_one_file(monkeypatch, tmp_path):
    linked, target = tmp_path / "linked", tmp_path / "library.so"
    linked.write_bytes(b"library")
    written = set()
    original = build.shutil.copy
    monkeypatch.setattr(build.shutil, "copy", lambda *to: (written.add(to[1]), original(*to)))
    for host in ("one", "two"):
        monkeypatch.setattr(build.socket, "gethostname", lambda host=host: host)
        build.install(linked, target, {})
    assert len(written) == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"linked", "library.so", "library.so.stamp"}
    monkeypatch.setattr(build.shutil, "copy", Mock(side_effect=OSError(28, "no space")))
    with pytest.raises(ExtensionError, match="cannot be put in place"):
        build.install(linked, target, {})


def test_torch_must_have_the_stable_abi(monkeypatch):
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "2.10.1+cpu")
    with pytest.raises(DependencyError, match="torch does not fit"):
        build.find_torch()


def test_a_library_that_does_not_load_is_a_typed_error(monkeypatch, tmp_path):
    broken = tmp_path / "megatron_sparse_cpu.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(sources, "library_path", lambda name: broken)
    with pytest.raises(ExtensionError, match="cpu library cannot be loaded"):
        cuda_ext._load_library("cpu")


@needs_nvcc
def test_the_cuda_library_compiles_without_spills(tmp_path):
    # A strict build refuses kernels that spill registers. A library that is up to date stays.
    (part,) = build.build("on", parts=("cuda",))
    assert part.state in ("built", "up to date")
    assert part.path.is_file()
    data = part.path.read_bytes()
    for arch in sources.CUDA_ARCHS:
        assert f"sm_{arch}".encode() in data
    assert cuda_ext.status()["cuda"]["loaded"]


REFUSAL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
try:
    torch.ops.megatron_sparse.hash_map(torch.tensor([0, 3000]), 3000, 7, 5, 2)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow  # half a minute: it compiles the CPU library
def test_numbers_in_errors_survive_a_libstdcxx_inside_the_library(tmp_path):
    if not Path(ended(["g++", "-print-file-name=libstdc++.a"], None).stdout.strip()).is_file():
        pytest.skip("g++ has no static libstdc++")
    compiler = stand_in(tmp_path / "g++", 'exec g++ -static-libstdc++ "$@"')
    built = command("--cuda", "off", "--out", tmp_path, CXX=str(compiler))
    assert built.returncode == 0, built.stderr
    library = sources.library_path("cpu", tmp_path)
    said = ended([sys.executable, "-c", REFUSAL, library], None).stdout
    assert "out of range at position 1 | 0 to 2999 | 3000" in said


REPORT = (
    "ptxas info    : Compiling entry function '_ZN1a12place_kernelEv' for 'sm_90'\n"
    "ptxas info    : Function properties for _ZN1a12place_kernelEv\n"
    "    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
    "ptxas info    : Used 64 registers, used 1 barriers, 8192 bytes smem\n"
)


def test_spills_are_refused():
    (kernel,) = ptxas.read_report(REPORT.format(spilled=0))
    assert (kernel.kernel, kernel.arch) == ("_ZN1a12place_kernelEv", "sm_90")
    assert kernel.registers == 64
    assert (kernel.shared_bytes, kernel.spill_bytes) == (8192, 0)
    ptxas.refuse_spills([kernel])
    with pytest.raises(ExtensionError, match="spills registers") as caught:
        ptxas.refuse_spills(ptxas.read_report(REPORT.format(spilled=4)))
    assert "8 bytes" in str(caught.value.got)


@needs_nvcc
def test_only_a_strict_build_refuses_spills(monkeypatch, tmp_path):
    report = REPORT.format(spilled=4)
    monkeypatch.setattr(build, "compile_all", lambda jobs, verbose: [report] * len(jobs))
    monkeypatch.setattr(build, "run", Mock(return_value=""))
    monkeypatch.setattr(build, "install", Mock())
    monkeypatch.setenv(build.STRICT, "0")
    (part,) = build.build("on", tmp_path, parts=("cuda",))
    assert part.state == "built"
    monkeypatch.setenv(build.STRICT, "1")
    with pytest.raises(ExtensionError, match="spills registers"):
        build.build("on", tmp_path, parts=("cuda",))


def test_each_library_is_made_of_its_own_sources(monkeypatch, tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(sources.SOURCES, csrc)
    monkeypatch.setattr(sources, "SOURCES", csrc)
    before = {name: sources.source_hash(name) for name in ("cpu", "cuda")}
    for changed, parts in (
        ("encode.cu", {"cuda"}),
        ("scan.cuh", {"cuda"}),
        ("decode_cuda.cpp", {"cuda"}),
        ("decode.cpp", {"cpu"}),
        ("record.h", {"cpu", "cuda"}),
    ):
        path = csrc / changed
        text = path.read_text()
        path.write_text(text + "// changed\n")
        after = {name: sources.source_hash(name) for name in before}
        assert {name for name in before if after[name] != before[name]} == parts, changed
        path.write_text(text)


def test_architectures_are_numbers():
    assert sources.cuda_archs("90") == (90,)
    with pytest.raises(DependencyError, match="no list of compute capabilities"):
        sources.cuda_archs("sm_90")

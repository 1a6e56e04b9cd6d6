"""Security: no data of a file or a peer is unpickled or run, and no secret is written.

Sources are checked by their syntax tree, so words in comments do not count.
"""

import ast
import json
import os
import re
from collections.abc import Iterator

import pytest

from megatron_sparse.config.redaction import (
    REDACTED,
    is_recorded_variable,
    is_secret_name,
    recorded_environment,
    redact,
    redact_command,
    redact_text,
)
from megatron_sparse.run import rank_log
from megatron_sparse.run.composition import compose, group_options, load, save
from megatron_sparse.telemetry.sinks import hidden_from_wandb
from tests.commands import refused
from tests.programs import ROOT

SHIPPED = ("megatron_sparse", "triton_kernels", "cuda_ext", "scripts", "examples")

PICKLES = {
    *(
        f"{module}.{name}"
        for module in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "joblib")
        for name in ("load", "loads", "Unpickler")
    ),
    "shelve.open",
    "pandas.read_pickle",
}
PICKLED_COLLECTIVES = {
    *(f"{name}_object" for name in ("all_gather", "gather")),
    *(f"{name}_object_list" for name in ("scatter", "broadcast", "send", "recv")),
}
"""Functions of torch.distributed that unpickle a peer's data."""
YAML_LOADERS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
RUNS_TEXT = {"eval", "exec", "os.system", "os.popen"}


def _keyword(call: ast.Call, name: str) -> object:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    return None


def dangers(source: str) -> Iterator[str]:
    """The parts of a Python source that trust bytes from outside."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if called in PICKLES | YAML_LOADERS | RUNS_TEXT or last in PICKLED_COLLECTIVES:
            yield f"line {node.lineno}: {called}"
        elif called == "torch.load" and _keyword(node, "weights_only") is not True:
            yield f"line {node.lineno}: torch.load without weights_only=True"
        elif called in ("np.load", "numpy.load") and _keyword(node, "allow_pickle") is not False:
            yield f"line {node.lineno}: {called} without allow_pickle=False"
        elif _keyword(node, "shell") not in (None, False):
            yield f"line {node.lineno}: {called} with a shell"


@pytest.mark.parametrize(
    ("line", "is_dangerous"),
    [
        ("pickle.load(f)", True),
        ("torch.load(p)", True),
        ("torch.load(p, weights_only=flag)", True),
        ("torch.load(p, weights_only=True)", False),
        ("np.load(p)", True),
        ("np.load(p, allow_pickle=False)", False),
        ("yaml.load(f, Loader=yaml.Loader)", True),
        ("dist.all_gather_object(a, b)", True),
        ("eval(x)", True),
        ("# eval(x)", False),
        ("model.eval()", False),
        ("subprocess.run(c, shell=True)", True),
        ("subprocess.run(c, shell=False)", False),
        ("os.system(c)", True),
    ],
)
def test_the_check_itself(line, is_dangerous):
    assert bool(list(dangers(line))) is is_dangerous


def test_nothing_shipped_unpickles_or_evaluates():
    files = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200, "the folders are where they were"
    for path in files:
        assert list(dangers(path.read_text(encoding="utf-8"))) == [], path


def test_no_script_evaluates_text():
    for path in (ROOT / "scripts").glob("*"):
        if path.suffix in (".sh", ".sbatch"):
            assert not re.search(r"^\s*eval\b", path.read_text(encoding="utf-8"), re.M), path


def test_a_configuration_cannot_name_python_objects(tmp_path):
    """PyYAML's tags for them are refused by the loader that reads a run's `config.yaml`."""
    from megatron_sparse.errors import ConfigError

    path = tmp_path / "config.yaml"
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'harm'}']\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)
    assert not (tmp_path / "harm").exists()


NAMES = {
    True: """
        WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID GITHUB_TOKEN_2 DB_PASSWORD
        db.passwd clientSecret apiKey apikey MY_KEY ssh_private_key --api-key
        cluster.env.OPENAI_API_KEY credentials REGISTRY_AUTH token PGPASS HF_CRED COOKIE AWS_SESSION
        SLURM_JWT
    """,
    False: """
        tokenizer_type moe_token_dispatcher_type tokens num_tokens
        key sort_key keep_patterns KEYBOARD author passes compass monkey 123
    """,
}
"""Names of secrets, and others."""


@pytest.mark.parametrize("is_secret", NAMES)
def test_names_of_secrets(is_secret):
    for name in NAMES[is_secret].split():
        assert is_secret_name(name) is is_secret, name
    assert not is_secret_name("")


def test_redact_goes_through_everything_and_mutates_nothing():
    address = "http://u:planted@h:1/x"
    env = {"HF_TOKEN": "planted", "NCCL_DEBUG": "INFO", "HTTP_PROXY": address}
    config = {
        "cluster": {"env": env},
        "address": address,
        "wandb": {"api_key": "planted", "entity": None},
        "tokens": ["hf_" + "a" * 30, "plain", 3],
        "passwords": ("kept",),
        "token": None,
        "use_token": True,
        "secret": ["planted", "planted"],
    }
    before = repr(config)
    shown = redact(config)
    assert repr(config) == before
    assert "planted" not in repr(shown)
    assert shown["cluster"]["env"] == env | {"HF_TOKEN": REDACTED, "HTTP_PROXY": REDACTED}
    assert shown["address"] == f"http://{REDACTED}@h:1/x"
    assert shown["tokens"] == [REDACTED, "plain", 3]
    # Whether a variable is set is no secret.
    assert (shown["token"], shown["wandb"]["entity"]) == (None, None)
    assert shown["secret"] == [REDACTED, REDACTED]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train cluster.env.HF_TOKEN=planted name=a", "train 'cluster.env.HF_TOKEN=***' name=a"),
        ("train 'cluster.env={A_KEY:planted,B:c}'", "train 'cluster.env={A_KEY:***,B:***}'"),
        (
            "train 'cluster.env={NCCL_DEBUG:INFO,PGOPT:\"x y\"}'",
            "train 'cluster.env={NCCL_DEBUG:INFO,PGOPT:***}'",
        ),
        ("x '++cluster.env.PLAIN=two, planted words'", "x '++cluster.env.PLAIN=***'"),
        ("x cluster.env.NCCL_DEBUG=INFO", None),
        ("x 'db.password=two, planted words'", "x 'db.password=***'"),
        ("x https://planted@sentry.io/1", "x 'https://***@sentry.io/1'"),
        ("x postgres://me:plan@ted@host/db", "x 'postgres://***@host/db'"),
        ("x --api-key planted --seed 3", "x --api-key *** --seed 3"),
        ("x --api-key=planted", "x '--api-key=***'"),
        ("curl https://me:planted@host/", "curl 'https://***@host/'"),
        ("megatron-sparse train compression.density=0.01", None),
    ],
)
def test_commands(command, shown):
    assert redact_command(command) == (shown or command)


PLANTED = {
    **dict.fromkeys(("PGPASS", "HF_CRED", "COOKIE", "AWS_SESSION", "INNOCENT_NAME"), "planted"),
    **dict.fromkeys(("SLURM_JWT", "SLURM_JOB_COMMENT", "SLURM_SPANK_AUTH"), "planted"),
    **dict.fromkeys(("NCCL_AUTH_TOKEN", "MEGATRON_SPARSE_API_KEY"), "planted"),
    "DATABASE_URL": "postgres://me:planted@host/db",
    "HTTPS_PROXY": "http://me:planted@proxy:3128",
    "HOME": "/home/planted",
    "SLURM_EXPORT_ENV": "ALL,PGPASS=planted",
}
HARMLESS = {
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "OMP_NUM_THREADS": "4",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "MEGATRON_SPARSE_RESTARTS": "3",
    "RANK": "1",
    "MASTER_ADDR": "n0",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_RESTART_COUNT": "0",
    "SLURM_CPUS_PER_TASK": "2",
}


def test_the_environment_is_recorded_by_an_allow_list():
    with_url = {"NCCL_CONF_FILE": "https://me:planted@host/x?token=planted"}
    shown = recorded_environment(PLANTED | HARMLESS | with_url)
    assert "planted" not in repr(shown)
    assert shown == HARMLESS | {"NCCL_CONF_FILE": f"https://{REDACTED}@host/x?token={REDACTED}"}
    assert list(shown) == sorted(shown)


def test_every_variable_that_we_ship_is_recorded():
    """Those of configs/cluster, which the user did not choose."""
    for option in group_options("cluster"):
        for name in compose([f"cluster={option}"]).cluster.env:
            assert is_recorded_variable(name), name


def test_wandb_does_not_see_slurms_secrets(monkeypatch):
    for name, value in (PLANTED | HARMLESS).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with hidden_from_wandb():
        seen = {name for name in os.environ if name.startswith("SLURM_")}
    assert seen == {name for name in HARMLESS if name.startswith("SLURM_")}
    assert dict(os.environ) == before


def test_a_rank_reports_its_error_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv(rank_log.ERROR_FILE, str(tmp_path / "error.json"))
    try:
        raise RuntimeError("no answer of postgres://me:planted@host, cluster.env.X=planted")
    except RuntimeError as error:
        rank_log.write_report(str(error), typed=False)
    assert "planted@" not in (tmp_path / "error.json").read_text()
    report = rank_log.read_report(json.loads((tmp_path / "error.json").read_text()))
    assert report == ("no answer of postgres://***@host, cluster.env.X=***", False)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("cluster.env.HF_TOKEN=planted", "export HF_TOKEN in"),
        ("cluster.env={HF_TOKEN:planted}", "export the variable in"),
        ("cluster.env={MYSQL:planted}", "export the variable in"),
    ],
)
def test_a_sweep_takes_no_secret_as_override(capsys, given, remedy):
    error = refused(capsys, f"train --multirun {given} training.seed=1,2")
    assert remedy in error
    assert "planted" not in error


def test_text_of_errors_keeps_the_explanation():
    text = "expected group=option or section.key=value, got cluster.env.HF_TOKEN=planted"
    assert redact_text(text) == (
        "expected group=option or section.key=value, got cluster.env.HF_TOKEN=***"
    )


def test_a_runs_configuration_has_no_secret_and_is_otherwise_what_ran(tmp_path):
    config = compose(
        ["cluster.env.HF_TOKEN=planted", "cluster.env.NCCL_DEBUG=INFO", "compression.density=0.02"]
    )
    path = tmp_path / "config.yaml"
    save(config, path, "megatron-sparse train cluster.env.HF_TOKEN=planted")
    assert "planted" not in path.read_text()
    read = load(path)
    assert read.cluster.env == config.cluster.env | {"HF_TOKEN": REDACTED}
    config.cluster.env["HF_TOKEN"] = REDACTED
    assert read == config


def test_an_error_on_the_command_line_has_no_secret(capsys):
    error = refused(capsys, "train cluster.env.HF_TOKEN=planted{")
    assert "HF_TOKEN=***" in error
    assert "planted" not in error

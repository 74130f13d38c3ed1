"""What is typed wins: options of groups on the command line, beside experiments and sweeps that set the same keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlexp.base.errors import ConfigError
from rlexp.config import load, precedence
from rlexp.config.elsewhere import composed_for
from rlexp.config.paths import conf_dir, experiments
from tests.conftest import Shell

MINE = """# @package _global_
defaults:
  - override /model: hf
  - _self_
model:
  path: Qwen/Qwen2.5-7B
parallel:
  ring_size: 2
optim:
  lr: 3e-4
"""
GROUPS = {
    group.name: sorted(file.stem for file in group.glob("*.yaml"))
    for group in sorted(conf_dir().iterdir())
    if group.is_dir() and group.name != "experiment"
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment of the user's own, where commands are typed."""
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return file


def raw(cfg: DictConfig, key: str) -> object:
    """Return a value as it is written, with its interpolations."""
    group, _, leaf = key.partition(".")
    node = OmegaConf.to_container(cfg[group], resolve=False, enum_to_str=True)
    assert isinstance(node, dict)
    return node[leaf]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dpo_8b" else pytest.mark.slow) for name in sorted(experiments())]
)
def test_a_typed_option_holds_or_is_refused(name: str) -> None:
    """Type each option of every group whose keys an experiment sets: what its file states is what the run has."""
    experiment, (file,) = f"+experiment={name}", experiments()[name]
    text = "".join(each.read_text() for each in (file, file.with_stem(name.removesuffix("_2nodes"))))
    named = {group: options for group, options in GROUPS.items() if re.search(rf"^{group}:", text, flags=re.MULTILINE)}
    for place in range(max(map(len, named.values()), default=0)):
        chosen = {group: options[place] for group, options in named.items() if place < len(options)}
        held = {group: option for group, option in chosen.items() if refusal(experiment, f"{group}={option}") is None}
        for group, option in chosen.items() - held.items():
            message = str(refusal(experiment, f"{group}={option}"))
            assert re.match(
                rf"{group}={option}: {re.escape(str(file.parent))}/\w+.yaml( \(.*\))? sets {group}\.", message
            )
        cfg = load.composed([experiment, *(f"{group}={option}" for group, option in held.items())])
        for group, option in held.items():
            if re.search(rf"override /{group}: {option}$", text, flags=re.MULTILINE):
                continue  # its own choice, with the keys that it sets
            for key, value in precedence.stated(group, option).items():
                assert raw(cfg, key) == value, f"{key} with {group}={option}"


def refusal(*overrides: str) -> ConfigError | None:
    try:
        precedence.conflicts(overrides)
    except ConfigError as refused:
        return refused
    return None


def test_what_is_typed_is_trained(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = load.composed(["+experiment=mine", "model=llama3_1_8b", "parallel=ring4", "optim=adamw"])
    assert raw(cfg, "model.path") == "meta-llama/Llama-3.1-8B-Instruct"
    assert raw(cfg, "parallel.ring_size") == 4
    assert raw(cfg, "optim.lr") == 3e-4  # the option has a default that follows from other keys, and states none
    said = capsys.readouterr().err
    assert f"model=llama3_1_8b is typed, so its model.path holds. {own} has Qwen/Qwen2.5-7B." in said
    assert f"parallel=ring4 is typed, so its parallel.ring_size holds. {own} has 2." in said


@pytest.mark.parametrize(
    ("sets", "typed", "holds"),
    [
        ("engine:\n  name: zero3\n", "engine=auto", ("engine.name", "${rlexp_engine:${train.precision}}")),
        ("optim:\n  name: sgd\n", "optim=adamw", ("optim.name", "adamw")),
        ("rollout:\n  mode: pipelined\n", "rollout=default", ("rollout.mode", "colocated")),
        ("reference:\n  name: none\n", "reference=auto",
         ("reference.name", "${rlexp_reference:${adapter.name},${reference.path}}")),
    ],
)  # fmt: skip
def test_an_option_that_leaves_its_name_to_others_holds_too(
    own: Path, sets: str, typed: str, holds: tuple[str, str]
) -> None:
    own.write_text(f"# @package _global_\n{sets}")
    assert raw(load.composed(["+experiment=mine", typed]), holds[0]) == holds[1]


def test_what_belongs_to_one_model_does_not_stay_with_another(own: Path) -> None:
    """The positions that the recipe stretches are those of its own model, and stay where that one is typed."""
    recipe = "+experiment=dpo_8b_128k"
    assert raw(load.composed([recipe, "model=llama3_1_8b"]), "model.rope") is None
    assert raw(load.composed([recipe, "model=qwen3_8b"]), "model.rope") == "yarn:4:32768"
    own.write_text(MINE.replace("  path: Qwen/Qwen2.5-7B", "  path: a/b\n  revision: abc\n  chat_template: chatml"))
    cfg = load.composed(["+experiment=mine", "model=qwen3_8b"])
    assert [raw(cfg, f"model.{leaf}") for leaf in ("path", "revision", "chat_template")] == [
        "Qwen/Qwen3-8B",
        None,
        None,
    ]


@pytest.mark.parametrize(("defaults", "name"), [
    ("- mine", "more"), ("- /experiment/mine", "more"), ("- /experiment/mine@_global_", "more"),
    ("- mine.yaml", "more.yaml"), ("- mine", "team/more"),
])  # fmt: skip
def test_files_that_an_experiment_builds_on_are_read_as_hydra_reads_them(own: Path, defaults: str, name: str) -> None:
    more = own.parent / f"{name.removesuffix('.yaml')}.yaml"
    more.parent.mkdir(exist_ok=True)
    more.write_text(f"# @package _global_\ndefaults:\n  {defaults}\n  - _self_\nseed: 1\n")
    cfg = load.composed([f"+experiment={name}", "parallel=ring4"])
    assert (raw(cfg, "parallel.ring_size"), cfg.seed) == (4, 1)


def test_an_environment_variable_may_name_the_option(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING", "ring4")
    assert raw(load.composed(["+experiment=mine", "parallel=${oc.env:RING}"]), "parallel.ring_size") == 4


@pytest.mark.parametrize("name", ["a" * 300, "spoilt"])
def test_a_file_that_is_none_is_left_to_hydra(own: Path, name: str) -> None:
    own.with_name("spoilt.yaml").write_text("# @package _global_\ndefaults: 5\n")
    assert precedence.conflicts([f"+experiment={name}", "model=tiny"]) == []


def test_a_refusal_names_the_experiment_that_builds_on_the_file(own: Path) -> None:
    own.with_name("more.yaml").write_text("# @package _global_\ndefaults:\n  - mine\n  - _self_\nseed: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml \(experiment=more builds on it\) sets model\.path, which"):
        load.composed(["+experiment=more", "model=tiny"])


def test_a_key_that_is_typed_wins_over_a_typed_option(own: Path) -> None:
    cfg = load.composed(["+experiment=mine", "model=llama3_1_8b", "model.path=FOLDER", "parallel={ring_size: 8}"])
    assert (raw(cfg, "model.path"), raw(cfg, "parallel.ring_size")) == ("FOLDER", 8)


@pytest.mark.parametrize(("typed", "sets"), [
    (["+experiment=ppo_tiny", "reward=python"], "ppo_tiny.yaml sets reward.rule and reward.pattern"),
    (["+experiment=mine", "model=tiny"], "mine.yaml sets model.path"),
])  # fmt: skip
def test_a_key_that_the_option_lacks_is_refused(own: Path, typed: list[str], sets: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load.composed(typed)
    assert f"{typed[1]}: " in str(refused.value)
    assert f"{sets}, which {typed[1]} does not have. Copy the file" in str(refused.value)


def test_the_options_of_a_sweep_hold_job_by_job(own: Path, rlexp: Shell) -> None:
    """Each job has the ring of its axis, also where the experiment names one, and where flags follow."""
    own.write_text("# @package _global_\nparallel:\n  ring_size: 2\n")
    dry = ("hydra/launcher=slurm", "hydra.launcher.dry_run=true", "hydra.sweep.dir=sw", "launch.device=cpu")
    answer = rlexp("+experiment=mine", "parallel=ring1,ring4", *dry, "-m")
    assert answer.returncode == 0, answer.stderr
    assert re.findall(r"ntasks-per-node=(\d)", answer.stdout) == ["1", "4"]


def test_a_sweep_with_an_option_that_is_refused_leaves_no_folder(own: Path, rlexp: Shell, tmp_path: Path) -> None:
    answer = rlexp("-m", "+experiment=ppo_tiny", "reward=rule,python", "launch.device=cpu", "hydra.sweep.dir=sw")
    assert answer.returncode == 1
    assert answer.stderr.startswith("rlexp: reward=python: "), answer.stderr
    assert not (tmp_path / "sw").exists()


def test_flags_may_follow(own: Path, rlexp: Shell) -> None:
    answer = rlexp("+experiment=mine", "parallel=ring4", "--cfg", "job", "--package", "parallel")
    assert "ring_size: 4\n" in answer.stdout, answer.stderr


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "it's", "a:b"])
def test_options_are_found_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("# @package _global_\nseed: 7\n")
    assert composed_for(["+experiment=own"], tmp_path / name).seed == 7

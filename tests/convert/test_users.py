"""What users write in files of their own, and what a trainer makes of it: each of these was once converted wrongly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlexp.base.errors import UserError
from rlexp.convert.conversion import ConvertError
from rlexp.convert.experiment import text_of
from rlexp.convert.rules import Fate
from tests.convert.texts import (
    AXOLOTL,
    COMMAND,
    FACTORY,
    GRPO,
    OPENRLHF,
    RAY,
    SWIFT,
    TRL,
    conversion,
    named,
    values,
    written,
)

SFT = SWIFT.replace("rlhf --rlhf_type dpo", "sft")
FACTORY_COMMAND = "FORCE_TORCHRUN=1 llamafactory-cli train theirs.yaml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("system.txt").write_text("Be brief.\nBe kind.")
    Path("theirs.yaml").write_text(FACTORY.replace("dpo", "sft") + "dataset_dir: .\n")
    Path("dataset_info.json").write_text(
        '{"d1": {"hf_hub_url": "org/d"}, "d2": {"hf_hub_url": "org/e", "split": "val"}}'
    )
    Path("sees").mkdir()
    Path("sees/config.json").write_text('{"model_type": "own", "vision_config": {}}')


@pytest.mark.parametrize(
    ("text", "trainer", "wanted"),
    [
        (f"{SFT} --system system.txt", None, {"data.system": "Be brief.\nBe kind."}),
        (f"{SFT} --system 'Be brief.'", None, {"data.system": "Be brief."}),
        (f"{FACTORY_COMMAND} learning_rate=1e-7 per_device_train_batch_size=2", None,
         {"optim.lr": 1e-7, "train.micro_batch_size": 2, "loss": "sft"}),
        ("accelerate launch LLaMA-Factory/src/train.py theirs.yaml", None, {"loss": "sft", "data.path": "org/d"}),
        (f"{FACTORY}dataset_dir: .\nsequence_parallel_size: 4\n", None,
         {"parallel.ring_size": 4, "train.batch_size": 16}),
        (f"{AXOLOTL}dpo_beta: 0.3\n", None, {"loss.beta": 0.3}),
        (f"{AXOLOTL}sample_packing: true\neval_sample_packing: false\n", None, {"data.drop_last": True}),
        (f"{AXOLOTL}sample_packing: true\n", None, {"data.drop_last": False}),
        (f"{SFT} --system \"${{P:-a (b); c\nd}}\"", None, {"data.system": "a (b); c\nd"}),
        (f"{AXOLOTL}fp16: true\nbf16: false\n", None, {"train.precision": "bf16"}),
        (AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "alpaca_chat.load_qa"), None,
         {"data.columns.prompt": "question", "data.columns.completion": "answer"}),
        (AXOLOTL.replace("chat_template.default", "{system_prompt: Be kind., field_instruction: q}"), None,
         {"data.system": "Be kind.", "data.columns.prompt": "q"}),
        (f"{SFT} --val_dataset held.jsonl --eval_steps 50", None,
         {"data.eval_path": "held.jsonl", "train.eval_every": 50}),
        (f"{AXOLOTL}eval_steps: 5\ntest_datasets: [{{path: org/d, split: test}}]\n", None,
         {"data.eval_split": "test", "train.eval_every": 5}),
        (f"{AXOLOTL}test_datasets: [{{path: org/e, split: val}}]\n", None,
         {"data.eval_path": "org/e", "data.eval_split": "val"}),
        (f"{FACTORY}dataset_dir: .\neval_dataset: d2\neval_strategy: epoch\n", None,
         {"data.eval_path": "org/e", "data.eval_split": "val", "train.eval_every": "1 epoch"}),
        (AXOLOTL.replace("path: org/d", "path: org/d, system_prompt: Be kind."), None, {"data.system": "Be kind."}),
        (f"{TRL}report_to: [none]\noutput_dir: ''\n", "dpo", {"logger": "none"}),
        (f"{COMMAND} --max_steps 20_000 --per_device_train_batch 2", None,
         {"train.max_steps": 20_000, "train.micro_batch_size": 2}),
        (f"{OPENRLHF} --seed 3 \\", None, {"seed": 3}),
    ],
)  # fmt: skip
def test_it_is_read_as_the_trainer_reads_it(text: str, trainer: str | None, wanted: dict[str, object]) -> None:
    conv = conversion(text, trainer, 8)
    assert wanted.items() <= values(conv).items()
    assert "hydra.run.dir" not in conv.command or conv.command["hydra.run.dir"].value


@pytest.mark.parametrize(
    ("text", "trainer", "name"),
    [
        (f"{SFT} --loss_type channel_loss", None, "loss_type"),
        (f"{AXOLOTL}unfrozen_parameters: [lm_head]\n", None, "unfrozen_parameters"),
        (f"{SFT} --system not_here.txt", None, "system"),
        (f"{TRL}lora_r: 16\n", "dpo", "lora_r"),
        (f"{AXOLOTL}lora_r: 16\n", None, "lora_r"),
        (f"{TRL}optim: galore_adamw\n", "dpo", "optim"),
    ],
)
def test_what_trains_otherwise_stands_in_the_first_lines(text: str, trainer: str | None, name: str) -> None:
    conv = conversion(text, trainer, 8)
    assert name in named(conv, Fate.INSTEAD)
    assert f"#   {name}: " in "\n".join(written(conv).splitlines()[:8])


@pytest.mark.parametrize("model", ["sees", "/data/Qwen2.5-VL-7B/", "org/m --model_type qwen2_vl", "org/MiniCPM-V-2_6"])
def test_a_model_that_sees_is_noticed(model: str) -> None:
    assert "Images: " in written(conversion(SFT.replace("--model org/m", f"--model {model}")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accelerate launch --num_processes 8 \\\n  my/train.py --learning_rate 1e-6 --output_dir out",
         "line 1 starts my/train.py, a program of its own, whose code decides what is trained. Write its arguments as"),
        ("cd /x\ntorchrun src/grpo.py --config recipes/a.yaml", "line 2 starts src/grpo.py, a program of its own, "
         "whose code decides what is trained. If it reads recipes/a.yaml as TRL does: python -m rlexp.convert "),
        ("swift sft --dataset org/d", "model: is missing, and it names the model that is trained. Add it to the "),
        (f"for s in 1 2; do {SWIFT} --seed $s; done", "Say which one is meant by the loop's variable: --set s=VALUE."),
        ("llamafactory-cli train $1", "the yaml file=$1: only bash knows what $1 is."),
        (f"{FACTORY}dataset_dir: .\ndo_predict: true\n", "do_predict=True: predicts, and trains nothing."),
        (f"{SWIFT} --sft_type lora", "sft_type=lora: is an argument of ms-swift before 3, which is not converted."),
        (f"{SWIFT} --dataset --beta 0.1", "dataset=True: has no value. Give one."),
        ("llamafactory-cli train cfg/$1.yaml", "the yaml file=cfg/$1.yaml: only bash knows what $1 is. Give the "),
    ],
)  # fmt: skip
def test_a_refusal_is_true_and_says_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ConvertError) as error:
        conversion(text, None, 8)
    assert said in str(error.value)


def test_the_head_says_what_matters_and_counts_the_rest() -> None:
    long = "x" * 300
    text = f"{AXOLOTL}lora_r: 16\neot_tokens: {long}\nweird: 1\nstrange: {long}\nflash_attention: true\nstrict: false\n"
    conv = conversion(text, None, 8)
    head = text_of(conv, "mine", "theirs", verbose=False).partition("\ndefaults:")[0].splitlines()
    assert head[3:] == [
        "# Trains something else than the file asks for:",
        "#   lora_r: 16   without adapter theirs has no adapter: all weights are trained, as there, at the given rate",
        "# Missing:", f"#   eot_tokens: {'x' * 60} …   the template ends a turn", "# Not known here: weird, strange.",
        "# 4 other arguments change nothing: see --verbose.",
    ]  # fmt: skip
    for number in range(12):
        conv.remark(Fate.INSTEAD, f"a{number}", 1, "why")
    assert "#   and 3 more: --verbose names them" in text_of(conv, "mine", "theirs", verbose=False).splitlines()
    assert written(conv).count("   why\n") == 12


@pytest.mark.parametrize(
    ("text", "trainer", "beside", "wanted"),
    [
        (GRPO, ["grpo", "trl==0.15"], "", {"loss.beta": 0.04, "rollout.temperature": 0.9, "loss.normalize": "sequence",
                                              "train.precision": "fp32"}),
        (GRPO, ["grpo"], "torch\ntrl==0.18.1\n", {"loss.beta": 0.04, "rollout.temperature": 1.0}),
        (f"# pip install trl==0.25\n{GRPO}", ["grpo"], "", {"loss.beta": 0.0, "data.max_length": 1024}),
        (SFT.replace("tuner_type", "train_type"), ["ms-swift==3.5.1"], "", {"data.eval_size": 0.01}),
        (SWIFT, ["ms-swift==3.7"], "", {"loss.sft_weight": 1.0}),
        (f"{RAY} --init_kl_coef 0", ["openrlhf==0.6.3"], "", {"loss.normalize": "sequence", "loss.lam": 0.95}),
        (f"{RAY} --actor.dual_clip 3", None, "", {"loss.normalize": "token", "loss.value_clip": 0.5}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_version(
    text: str, trainer: list[str] | None, beside: str, wanted: dict[str, object]
) -> None:
    Path("requirements.txt").write_text(beside)
    conv = conversion(text, trainer, 8)
    assert wanted.items() <= values(conv).items()
    assert "Versions: " not in written(conv) or "==3.5" in str(trainer)


def test_where_the_version_is_not_known_the_first_lines_say_what_others_had() -> None:
    head = " ".join(written(conversion(GRPO, "grpo", 8)).replace("\n#", "").splitlines()[:6])
    assert "Versions: the newest defaults of TRL are taken. Older ones had bf16=False before 0.19, " in head
    assert "beta=0.04 before 0.19" in head
    assert "--trainer trl==VERSION" in head
    for wrong, said in (
        ("trl==x", "--trainer trl==x: must be one of trl, ms-swift, "),
        ("axolotl==0.5", "a version of axo"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            conversion(GRPO, ["grpo", wrong], 8)


@pytest.mark.parametrize(
    ("text", "trainer", "said"),
    [
        (f"{AXOLOTL}val_set_size: 0.1\nsaves_per_epoch: 1\nevals_per_epoch: 4\n", None, "load_best_model_at_end: true"),
        (f"{AXOLOTL}sample_packing: true\n", None, "rows of a block see each other there"),
        (f"{AXOLOTL}bf16: true\n", None, "weights that are trained are float32, theirs bfloat16 without DeepSpeed"),
        (AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "completion"), None,
         "a text that is longer goes on in the next block there"),
        (f"{TRL}num_train_epochs: 0.1\n", "sft", "only whole epochs are counted here, and 1 is taken"),
        (f"{FACTORY}dataset_dir: .\neval_dataset: d1\n", None, "theirs evaluates rows that it trains on"),
        (OPENRLHF.replace("train_dpo", "train_sft") + "--input_key q --output_key a", None, "input_template: "),
    ],
)  # fmt: skip
def test_what_differs_is_said(text: str, trainer: str | None, said: str) -> None:
    conv = conversion(text, trainer, 8)
    assert said in text_of(conv, "mine", "theirs", verbose=False).replace("\n#       ", " ")


def test_a_variable_that_the_script_reads_too_is_given_to_the_command() -> None:
    conv = conversion(f"export NPROC_PER_NODE=2 X=1\nNPROC_PER_NODE=$NPROC_PER_NODE {SFT.partition(' ')[2]} --seed $X")
    assert {"launch.nproc": 2, "seed": 1}.items() <= values(conv).items()
    assert "X" not in named(conv, Fate.OTHER)

"""The losses of other trainers, with their rollouts: which of ours each is, and which trainer a loss tells."""

from __future__ import annotations

from typing import Any

import pytest

from rlexp.config.schema import KINDS
from rlexp.convert.trl import RULES, TELLTALE, trainer_of
from tests.convert import tables
from tests.convert.tables import ABSENT, INSTEAD, NEEDLESS, OTHER, REMARK, Becomes, Table
from tests.convert.texts import AXOLOTL, AXOLOTL_SFT, FACTORY, GRPO, OPENRLHF, PPO, RAY, SWIFT, SWIFT_SFT, TRL

pytestmark = pytest.mark.usefixtures("folder")
SWIFT_GRPO = SWIFT.replace("dpo", "grpo") + "--reward_funcs accuracy format "
LOSSES: Table = {
    (TRL, "dpo"): {
        "loss_type: sigmoid_norm": {"loss": "dpo_norm"},
        **{f"loss_type: {name}": {"loss": name} for name in ("apo_down", "nca_pair", "sppo_hard")},
        "label_smoothing: 0.1\ndiscopop_tau: 0.1": {"loss": "dpo", "loss.label_smoothing": 0.0, "loss.tau": None,
            OTHER: "label_smoothing", NEEDLESS: "discopop_tau"},
        "loss_type: robust\nlabel_smoothing: 0.2": {"loss": "robust", "loss.label_smoothing": 0.2},
        "loss_type: robust": {"loss.label_smoothing": 0.0},
        "loss_type: exo_pair\nlabel_smoothing: 0": {"loss": "exo_pair", OTHER: "label_smoothing"},
        "loss_type: [ipo]\nlabel_smoothing: 0.1\nld_alpha: 0.5": {"loss": "ipo", "loss.normalize": "token",
            "loss.ld_alpha": None, OTHER: "label_smoothing", ABSENT: "ld_alpha"},
        "loss_type: aot_pair\nld_alpha: 1.0": {"loss": "aot_unpaired", NEEDLESS: "ld_alpha"},
        "loss_type: bco_pair": {"loss": "bco_pair", "loss.shift": "none"},
        "loss_type: discopop\ndiscopop_tau: 0.1": {"loss": "discopop", "loss.tau": 0.1},
        # sums of losses
        "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nlabel_smoothing: 0.1": {"loss": "mpo",
            "loss.sft_weight": 1.0, OTHER: "label_smoothing",
            "loss.terms": [{"loss": "dpo", "weight": 0.8, "label_smoothing": 0.0},
            {"loss": "bco_pair", "weight": 0.2, "shift": "none"}]},
        "loss_type: ipo\nloss_weights: [2.0]": {"loss": "mpo",
            "loss.terms": [{"loss": "ipo", "weight": 2.0, "beta": 0.1, "normalize": "token"}]},
        "loss_type: [sigmoid_norm, sigmoid]\nbeta: 3.0": {"loss.beta": 3.0,
            "loss.terms": [{"loss": "dpo_norm", "weight": 1.0, "beta": 3.0, "label_smoothing": 0.0},
            {"loss": "dpo", "weight": 1.0, "label_smoothing": 0.0}]},
        "loss_type: [sigmoid, hinge, sft]\nloss_weights: [0, 1, 0]": {"loss": "hinge", "loss.sft_weight": 0.0},
        "loss_type: [hinge, hinge]\nloss_weights: [1, 2]": {"loss.terms": [{"loss": "hinge", "weight": 3.0}]},
        "loss_type: [apo_zero, sft]": {"loss": "apo_zero", "loss.sft_weight": 1.0,
            REMARK: "a mean over the tokens of each micro-batch"},
        "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\nrpo_alpha: 1.0": {"loss.sft_weight": pytest.approx(1.2),
            NEEDLESS: "", REMARK: "# loss_type, loss_weights, rpo_alpha"},
        "loss_type: [kto_pair, hinge]": {"loss": "hinge", INSTEAD: "loss_type"},
        # weights of pairs and of tokens
        "use_weighting: true\nrpo_alpha: 0.5\nld_alpha: 0.5": {"loss": "dpo", "loss.sft_weight": 0.5, "loss.wpo": True,
            "loss.ld_alpha": None, OTHER: "use_weighting", ABSENT: "ld_alpha"},
        "loss_type: aot\nuse_weighting: true": {"loss": "aot", "loss.wpo": None, ABSENT: "use_weighting"},
        "use_weighting: true": {"loss.wpo": True},
        "ld_alpha: 0.5": {"loss.ld_alpha": 0.5},
        # chosen answers alone
        "loss_type: sft\nbeta: 0.3\nld_alpha: 0.5": {"loss": "sft", "loss.beta": None, NEEDLESS: "beta, ld_alpha",
            REMARK: "Supervised training: theirs is a mean over the tokens of each micro-batch"},
        "loss_type: [sigmoid, sft]\nloss_weights: [0, 2]": {"loss": "sft", OTHER: "loss_weights"}},
    TRL: {  # the arguments tell the trainer
        "cpo_alpha: 0.5\nlabel_smoothing: 0.1\nbeta: 0.2": {"loss": "cpo", "loss.sft_weight": 0.5,
            "loss.label_smoothing": 0.1, "loss.beta": 0.2},
        "loss_type: simpo\nsimpo_gamma: 1.6\ncpo_alpha: 0": {"loss": "simpo", "loss.gamma": 1.6, "loss.sft_weight": 0},
        "gamma_beta_ratio: 0.3\nbeta: 10": {"loss": "simpo", "loss.gamma": 3.0, "loss.beta": 10},
        "assistant_only_loss: true\ncompletion_only_loss: true":
            {NEEDLESS: "assistant_only_loss, completion_only_loss"},
        "assistant_only_loss: false\ncompletion_only_loss: false": {OTHER: "assistant_only_loss, completion_only_loss"},
        "loss_type: dft": {"loss": "sft", INSTEAD: "loss_type"},
        "undesirable_weight: 1.5\nmax_prompt_length: 512\nmax_completion_length: 512\n"
            "truncation_mode: keep_end\nprecompute_ref_log_probs: true": {"loss": "kto", "loss.undesirable_weight": 1.5,
            OTHER: "max_prompt_length", NEEDLESS: "precompute_ref_log_probs"},
        "loss_type: apo_zero_unpaired\nbeta: 0.2": {"loss": "apo_zero_unpaired", "loss.beta": 0.2},
        "loss_type: bco\ndesirable_weight: 1.0": {"loss": "kto", INSTEAD: "loss_type"},
        "prompt_sample_size: 512": {"loss": "bco", "loss.shift": "mean", "data.shuffle": None, "optim.lr": 5e-7,
            NEEDLESS: "prompt_sample_size", REMARK: "BCO: theirs moves the mean reward with each micro-batch"},
        "total_episodes: 10\nsave_steps: 5\neval_strategy: steps\neval_steps: 7\nnum_ppo_epochs: 3\nlearning_rate: 1": {
            "reward.path": "EleutherAI/pythia-160m", "checkpoint.save_every": "15", "train.eval_every": 21,
            "optim.lr": 1}},
    (TRL, "cpo"): {"loss_type: hinge": {"loss": "cpo", INSTEAD: "loss_type"}},
    (TRL, "orpo"): {"beta: 0.2\nmax_length: 512": {"loss": "orpo", "loss.beta": 0.2, "loss.sft_weight": 1.0,
        "data.max_length": 512, REMARK: "ORPO: the likelihood in theirs counts the tokens of the prompt too"}},
    (TRL, "sft"): {"loss_type: nll": {"loss": "sft", "optim.lr": 2e-5, "data.too_long": "truncate",
        "data.shuffle": None, REMARK: "theirs trains every token unless assistant_only_loss is true"}},
    (TRL, "kto"): {
        "": {"loss": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0, "optim.lr": 1e-6, "data.shuffle": False,
            REMARK: "KTO: theirs estimates the divergence from each micro-batch's prompts"},
        "beta: 0.2": {"loss.beta": 0.2, REMARK: "rlexp does so with data.unpair=true"}},
    (TRL, "reward"): {
        "": {"loss": "reward", "loss.center": 0.0, "optim.lr": 1e-4, "data.too_long": "drop",
            REMARK: "theirs reads the score at the token before the end"},
        "max_length: null": {"data.too_long": "error", OTHER: "max_length",
            REMARK: "loss.margin_weight=0 is a run without margins"}},
    (PPO, "ppo"): {"": {"loss": "ppo", "rollout.temperature": 0.7, OTHER: "model_name_or_path"}},
    PPO: {"sft_model_path: org/sft\ntemperature: 0.9": {"model.path": "org/sft", "reward.path": "org/r",
        "rollout.temperature": 0.9, OTHER: "model_name_or_path"}},
    (TRL, "grpo"): {
        "reward_funcs: [m1.score, m2.score]\nreward_weights: [1.0, 0.5]": {"reward.terms.score.function": "m1:score",
            "reward.terms.m2_score.function": "m2:score", "reward.terms.score.weight": 1.0,
            "reward.terms.m2_score.weight": 0.5},
        "reward_funcs: [a.model]\nreward_model_name_or_path: org/r": {"reward.terms.model.function": "a:model",
            "reward.terms.model2.path": "org/r"}},
    (GRPO, "grpo"): {
        "scale_rewards: batch": {"loss": "dr_grpo", INSTEAD: "scale_rewards"},
        "importance_sampling_level: sequence": {"loss": "gspo"},
        "scale_rewards: group": {"loss": "grpo"},
        "use_vllm: true": {"rollout.importance_cap": None, ABSENT: "vllm_importance_sampling_mode"},
        "scale_rewards: none\nuse_vllm: true\nvllm_importance_sampling_mode: token_truncate": {"loss": "dr_grpo",
            "rollout.importance_cap": 3.0}},
    (GRPO, "rloo"): {"": {"loss": "rloo"}},
    OPENRLHF: {
        "--ipo --nll_loss_coef 0.2 --label_smoothing 0.1": {"loss": "ipo", "loss.normalize": "sequence",
            "loss.sft_weight": 0.2, NEEDLESS: "label_smoothing", REMARK: "a mean over each answer's tokens"},
        "--label_smoothing 0.1": {"loss": "dpo", "loss.label_smoothing": 0.1}},
    OPENRLHF.replace("dpo", "kto"): {"--undesirable_loss_weight 1.5 --output_key said --label_key good": {"loss": "kto",
        "loss.beta": 0.01, "loss.undesirable_weight": 1.5, "data.columns.prompt": "input",
        "data.columns.completion": "said", "data.columns.label": "good", "optim.lr": 1e-5}},
    OPENRLHF.replace("dpo", "rm"): {
        "--value_head_prefix v_head": {"loss": "reward", "loss.margin_weight": 0.0, ABSENT: "value_head_prefix"},
        "--loss logexp --lora_rank 8": {INSTEAD: "loss", REMARK: "LoRA: theirs freezes the head that scores"}},
    RAY: {
        "": {"loss": "ppo", "loss.value_coef": 1.0},
        "--vllm_enable_sleep --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 4.0 --max_len "
            "4096 --prompt_max_len 1024 --generate_max_len 512": {"rollout.vllm_sleep": True,
            "rollout.importance_cap": 4.0, "data.max_length": 1536, "rollout.max_new_tokens": 512, NEEDLESS: "max_len",
            ABSENT: "vllm_is_truncated_threshold"},
        "--enable_vllm_is_correction --vllm_is_correction_type icepop": {"rollout.importance_cap": None,
            ABSENT: "vllm_is_correction_type"},
        "--advantage_estimator reinforce --gamma 0.99": {"loss": "reinforce_pp", ABSENT: "gamma"}},
    SWIFT: {
        "--label_smoothing 0.1": {"loss": "dpo", "loss.label_smoothing": 0.1},
        "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1": {"loss": "mpo", "loss.sft_weight": 1.0},
        "--loss_type sft --beta 0.2 --ref_model org/r": {"loss": "sft", "reference.path": None, NEEDLESS: "ref_model"}},
    SWIFT.replace("dpo", "simpo"): {"": {"loss": "simpo", "loss.gamma": 1.0, "loss.beta": 2.0, "loss.sft_weight": 1.0}},
    SWIFT.replace("dpo", "cpo"): {"--cpo_alpha 0.5": {"loss": "cpo", "loss.beta": 0.1, "loss.sft_weight": 0.5}},
    SWIFT.replace("dpo", "orpo"): {"--beta 0.3 --ref_model org/r": {"loss": "orpo", "loss.beta": 0.3,
        "loss.sft_weight": 1.0, "reference.path": None, NEEDLESS: "ref_model"}},
    SWIFT.replace("dpo", "kto"): {"--desirable_weight 2 --ref_model org/r": {"loss": "kto", "loss.beta": 0.1,
        "loss.desirable_weight": 2.0, "reference.path": "org/r"}},
    SWIFT.replace("dpo", "rm"): {"--center_rewards_coefficient 0.01": {"loss": "reward", "loss.center": 0.01}},
    SWIFT.replace("rlhf --rlhf_type dpo", "pt"): {"": {"loss": "sft", OTHER: "dataset"}},
    SWIFT_SFT: {
        "--packing true --loss_scale default": {"data.packing": True, OTHER: "packing", NEEDLESS: "loss_scale"},
        "--loss_type channel_loss": {INSTEAD: "loss_type"}},
    SWIFT_GRPO: {
        "--sequence_parallel_size 2 --per_device_train_batch_size 8 --num_generations 8 "
            "--gradient_accumulation_steps 2": {"train.batch_size": 64, "rollout.batch_size": 8},
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 8 "
            "--max_completion_length 1024 --max_length 2048 --overlong_filter true --dynamic_sample true":
            {"loss": "grpo", "loss.beta": 0.04, "loss.normalize": "sequence", "rollout.temperature": 0.9,
            "rollout.n_samples": 8, "rollout.batch_size": 4, "train.batch_size": 32, "data.max_length": 3072,
            "data.too_long": "truncate", "rollout.overlong": "mask", "loss.filter": True, "reward": "sum",
            "reward.terms.format.function": "rewards:format"},
        "--num_generations 4 --use_vllm true --vllm_mode colocate --temperature 1.0 --top_k 50 --top_p 1.0":
            {"rollout.temperature": 1.0, "rollout.engine": "vllm", "rollout.importance_cap": None,
            "data.drop_last": None, "rollout.top_k": 50, "rollout.top_p": 1.0},
        "--num_generations 4 --top_k 50": {"rollout.top_k": 50, INSTEAD: ""},
        "--beta 0 --num_generations 4 --loss_type dapo --advantage_estimator rloo "
            "--importance_sampling_level sequence": {"loss": "gspo", "loss.beta": 0, "loss.normalize": "token",
            INSTEAD: "advantage_estimator"}},
    AXOLOTL: {
        "rl_beta: 0.2\ntrl: {beta: 0.3, num_generations: 4}": {"loss.beta": 0.3, ABSENT: "trl: num_generations"},
        "dpo_loss_type: [hinge]\ndpo_use_weighting: true\ndpo_beta: 0.3": {"loss": "hinge", "loss.wpo": True,
            "loss.beta": 0.3},
        "dpo_loss_type: [sft]\nrl_beta: 0.2": {"loss": "sft", "loss.beta": None, NEEDLESS: "rl_beta"}},
    AXOLOTL.replace("dpo", "ipo"): {"rl_beta: 0.2\ndpo_label_smoothing: 0.1": {"loss": "ipo", "loss.beta": 0.2,
        "loss.normalize": "token", OTHER: "dpo_label_smoothing"}},
    AXOLOTL.replace("dpo", "orpo"): {
        "orpo_alpha: 0.3": {"loss": "orpo", "loss.beta": 0.3, "loss.sft_weight": 1.0},
        "orpo_alpha: 0.3\nrl_beta: 0.2": {"loss.beta": 0.2, NEEDLESS: "orpo_alpha"}},
    AXOLOTL.replace("dpo", "simpo"): {"rl_beta: 2.0\ncpo_alpha: 0.1\nsimpo_gamma: 0.8": {"loss": "simpo",
        "loss.gamma": 0.8, "loss.sft_weight": 0.1, "loss.beta": 2.0}},
    AXOLOTL.replace("dpo", "kto"): {"rl_beta: 0.2\nkto_undesirable_weight: 0.2": {"loss": "kto", "loss.beta": 0.2,
        "loss.undesirable_weight": 0.2, "loss.desirable_weight": 1.0}},
    AXOLOTL_SFT: {
        "sample_packing: true\ntrain_on_inputs: true\nrl_beta: 0.1": {"loss": "sft", "loss.beta": None,
            "data.packing": True, OTHER: "sample_packing, train_on_inputs", NEEDLESS: "rl_beta"},
        "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]": {"loss": "sft", INSTEAD: "plugins"}},
    FACTORY: {
        "pref_loss: orpo\npref_beta: 0.2\npref_ftx: 0.5": {"loss": "orpo", "loss.beta": 0.2, "loss.sft_weight": 1.5},
        "pref_loss: simpo\nref_model: org/r\nld_alpha: 0.5\ndpo_label_smoothing: 0.1": {"loss": "simpo",
            "loss.beta": 0.1, "loss.gamma": 0.5, "loss.sft_weight": 0.0, "reference.path": None,
            NEEDLESS: "ref_model, dpo_label_smoothing", ABSENT: "ld_alpha"},
        "pref_bco_weight: 0.25\npref_ftx: 0.1\ndpo_label_smoothing: 0.1": {"loss": "mpo", "loss.sft_weight": 0.1,
            "loss.terms": [{"loss": "dpo", "weight": 0.8, "label_smoothing": 0.1},
            {"loss": "bco_pair", "weight": 0.2, "shift": "mean"}], REMARK: "a mean over each answer's tokens"},
        "pref_loss: ipo": {"loss": "ipo", "loss.normalize": "token"},
        "ref_model: org/r\nkto_chosen_weight: 2.0": {"reference.path": "org/r", NEEDLESS: "kto_chosen_weight"}},
    FACTORY.replace("dpo", "sft"): {
        "pref_beta: 0.2\nref_model: org/r\npacking: true\ntrain_on_prompt: true\nmask_history: false\n"
            "disable_shuffling: true\nuse_dft_loss: true": {"loss": "sft", "loss.beta": None, "reference.path": None,
            "data.shuffle": False, INSTEAD: "use_dft_loss", NEEDLESS: "pref_beta, ref_model, mask_history",
            OTHER: "packing, train_on_prompt"}},
    FACTORY.replace("dpo", "kto").replace("d1", "d7"): {
        "kto_chosen_weight: 2.0\npref_ftx: 0.1\nref_model: org/r\ntrain_on_prompt: true": {"loss": "kto",
            "loss.desirable_weight": 2.0, "loss.beta": 0.1, "reference.path": "org/r", "data.columns.label": "good",
            "data.columns.completion": "said", ABSENT: "pref_ftx", NEEDLESS: "train_on_prompt",
            OTHER: "dataset: formatting, dataset: history"}},
    FACTORY.replace("dpo", "rm"): {"packing: true": {"loss": "reward", "loss.margin_weight": 0.0, "loss.beta": None,
        NEEDLESS: "packing", REMARK: "Reward model: theirs is a value head beside"}},
}  # fmt: skip
CASES = tables.cases(LOSSES)


@pytest.mark.parametrize(("text", "trainer", "wanted"), CASES)
def test_a_loss_becomes_ours(text: str, trainer: str | None, wanted: Becomes) -> None:
    tables.assert_becomes(tables.of_eight(text, trainer), wanted)


@pytest.mark.parametrize(("text", "trainer", "wanted"), [case for case in CASES if "loss" in case.values[2]])
def test_its_experiment_composes(text: str, trainer: str | None, wanted: Becomes) -> None:
    assert tables.experiment_of(tables.of_eight(text, trainer)).loss.name == wanted["loss"]


def test_a_file_leads_to_every_loss() -> None:
    """A loss that is new here has a name in other trainers too: one of their files must lead to it."""
    missing = KINDS["loss"].keys() - {case.values[2].get("loss") for case in CASES}
    assert not missing, f"no file of another trainer leads to loss={missing}: give it one in LOSSES, and a rule"


LOSSES_OF_TRAINERS: tuple[tuple[Any, str | None], ...] = (
    (["sigmoid"], "dpo"), ("sigmoid", "dpo"), (["sigmoid", "sft"], "dpo"), (["sft"], "dpo"), ("simpo", "cpo"),
    ("apo_zero_unpaired", "kto"), ("nll", "sft"), ("dapo", "grpo"), ("bnpo", "grpo"), (["a"], None), (["dapo"], None),
    ([["sigmoid"]], None),
)  # fmt: skip


@pytest.mark.parametrize(("loss", "trainer"), LOSSES_OF_TRAINERS)
def test_a_loss_tells_its_trainer(loss: Any, trainer: str | None) -> None:
    assert trainer_of({"loss_type": loss}) == trainer


def test_a_telltale_argument_belongs_to_one_trainer() -> None:
    """By our own rules, for the trainers that we have."""
    rules = {name: {rule.trainers for rule in RULES if name in rule.names} for rule in RULES for name in rule.names}
    for trainer, words in TELLTALE.items():
        others = [rules.get(word, {(trainer,)}) - {(trainer,)} for word in words.split()]
        shared = dict(zip(words.split(), others, strict=True)) | {"rloo_k": set()}
        assert not any(shared.values()), shared

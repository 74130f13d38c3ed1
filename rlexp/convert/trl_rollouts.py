"""TRL's trainers that draw samples: GRPO, RLOO, and PPO of earlier versions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlexp.convert import kinds
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.rules import UNSAID, ByTrainer, Fate, Rule, absent, for_trainers, needless, other, taken, worked_out

DIVISORS = {"grpo": "sequence", "dapo": "token", "dr_grpo": "fixed"}
LONG = 1024  # tokens that are allowed where TRL has no limit
ELSEWHERE = "no number depends on it here"
UNWEIGHED = "vLLM generates no samples, or no weight is asked for"
WINDOWS = ("vllm_max_model_length", "vllm_max_model_len")  # of prompt and answer
TRAINERS, DRAWING = "grpo rloo ppo", "grpo rloo"
Rewards = dict[str, dict[str, Any]]  # what each is, by the name of its term

RULES: tuple[Rule, ...] = (
    *for_trainers(DRAWING,
        # samples
        taken("num_generations rloo_k", "rollout.n_samples", default=ByTrainer(grpo=8, rloo=2), least=1),
        taken("max_completion_length response_length", "rollout.max_new_tokens", least=1, of=TRAINERS,
              default=ByTrainer(grpo=512, rloo=512, ppo=53)),
        worked_out("steps_per_generation", "rollout.batch_size", "rlexp splits a rollout into train batches", least=1),
        worked_out("generation_batch_size", "rollout.batch_size", "prompts, not answers", least=1),
        taken("num_iterations", "rollout.epochs", default=1),
        taken("temperature", "rollout.temperature", default=1.0),
        taken("temperature", "rollout.temperature", default=0.7, of="ppo"),
        taken("top_p", "rollout.top_p", default=1.0),
        taken("top_k", "rollout.top_k", default=0, to=lambda value: 0 if value in (None, -1) else value),
        taken("min_p", "rollout.min_p", to=lambda value: value or 0.0),
        absent("generation_kwargs", "use rollout.stop, top_k, top_p, min_p and temperature"),
        absent("repetition_penalty", "no repetition penalty", 1.0, 1, until="repetition"),
        absent("vllm_structured_outputs_regex", "answers are generated freely"),
        absent("num_generations_eval", "one answer per held-out prompt"),
        worked_out("use_vllm", "rollout.engine=vllm"),
        worked_out("vllm_mode", "rollout.mode", "vLLM's server mode is missing", "all ranks sample, then all train"),
        taken("vllm_gpu_memory_utilization", "rollout.vllm_memory"),
        absent("vllm_tensor_parallel_size", "rlexp does not split a model to sample", 1),
        taken("vllm_enable_sleep_mode", "rollout.vllm_sleep", default=False),
        needless("vllm_model_impl vllm_max_model_length vllm_max_model_len vllm_device vllm_dtype vllm_server_base_url "
                 "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port cache_implementation",
                 "no number depends on it"),
        worked_out("vllm_importance_sampling_correction", "rollout.importance_cap",
                   "weighs samples that vLLM generated", UNWEIGHED, default=True),
        worked_out("vllm_importance_sampling_mode", "rollout.importance_cap", "token_truncate; others are missing",
                   UNWEIGHED, default="sequence_mask"),
        worked_out("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "rollout.importance_cap",
                   rest=UNWEIGHED, default=3.0),
        absent("vllm_importance_sampling_clip_min", "a weight has no lower limit"),
        needless("use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
                 "no number depends on it"),
        taken("mask_truncated_completions overlong_filter", "rollout.overlong",
              to=lambda value: "mask" if kinds.flag(value) else UNSAID),
        taken("log_completions", "rollout.show_every", default=False, to=lambda value: 10 if kinds.flag(value) else 0),
        taken("num_completions_to_print", "rollout.show"),
        needless("log_unique_prompts wandb_log_unique_prompts log_multimodal log_completions_hub_repo",
                 "a few samples of a rollout are shown"),
        absent("max_tool_calling_iterations", "answers call no tools", until="tool_call"),
        # rewards
        worked_out("reward_funcs", "reward=python, reward.function",
                   "the function gets other arguments: docs/rewards.md"),
        worked_out("reward_model_name_or_path reward_model_path reward_model", "reward=model, reward.path",
                   of=TRAINERS),
        worked_out("reward_weights", "reward.terms.NAME.weight", rest="there is one reward"),
        absent("multi_objective_aggregation", "rlexp adds scores, then normalizes", "sum_then_normalize", of="grpo"),
    ),
    *for_trainers("grpo",
        worked_out("scale_rewards", "loss=grpo or loss=dr_grpo", rest="importance_sampling_level=sequence decides"),
        worked_out("loss_type", "loss.normalize", "grpo is sequence, dapo is token, dr_grpo is fixed", default="dapo"),
        worked_out("importance_sampling_level", "loss=gspo", "sequence, with loss_type=grpo",
                   "token is the level of every loss but gspo", default="token"),
        taken("beta", "loss.beta", default=0.0),
        worked_out("use_bias_correction_kl", "loss.kl", rest="the divergence is k3 itself here", default=True),
        worked_out("epsilon", "loss.clip_low", default=0.2, of=DRAWING),
        worked_out("epsilon_high", "loss.clip_high", of=DRAWING),
        taken("delta", "loss.dual_clip"),
        taken("entropy_coef", "loss.entropy"),
        absent("use_adaptive_entropy", "the weight of the entropy is fixed"),
        needless("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
                 "only with use_adaptive_entropy"),
        absent("top_entropy_quantile", "all tokens of an answer are trained on", 1.0, 1),
        absent("off_policy_mask_threshold", "rlexp weighs samples, and drops none"),
        needless("sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
                 "only with losses that rlexp lacks"),
    ),
    taken("beta", "loss.beta", default=0.05, of="rloo"),
    absent("normalize_advantages", "loss.whiten is over the train batch, by tokens", of="rloo"),
    absent("reward_clip_range", "scores are not clipped", of="rloo"),
    *for_trainers("ppo",
        taken("kl_coef", "loss.beta", default=0.05),
        taken("kl_estimator", "loss.kl", default="k1"),
        worked_out("cliprange", "loss.clip_low, loss.clip_high", default=0.2),
        taken("cliprange_value", "loss.value_clip", default=0.2),
        taken("vf_coef", "loss.value_coef", default=0.1),
        taken("gamma", "loss.gamma", default=1.0),
        taken("lam", "loss.lam", default=0.95),
        taken("num_ppo_epochs", "rollout.epochs", default=4, least=1),
        other("num_mini_batches", "rollout.minibatches", "TRL ignores it; in rlexp train.batch_size decides"),
        worked_out("total_episodes", "train.max_steps", least=1),
        worked_out("missing_eos_penalty", "rollout.overlong=penalty, rollout.overlong_penalty"),
        needless("stop_token stop_token_id", "an answer ends with the end-of-sequence token"),
        absent("whiten_rewards", "loss.whiten normalizes advantages"),
        needless("local_rollout_forward_batch_size num_sample_generations exp_name batch_size mini_batch_size "
                 "micro_batch_size local_batch_size num_total_batches", "no number depends on it"),
    ),
)  # fmt: skip


def convert(conv: Conversion, replicas: int, micro: int, steps: int, *, prompt: str = "max_prompt_length") -> None:
    """Set the loss, the rewards and the rollout; `prompt` limits prompts."""
    {"grpo": _grpo, "rloo": _rloo, "ppo": _ppo}[conv.trainer](conv)
    if conv.trainer != "ppo":
        low = conv.number("epsilon")
        conv.put("loss.clip_low", low, "epsilon")
        conv.put("loss.clip_high", conv.number("epsilon_high", low), "epsilon_high", "epsilon")
        _engine(conv)
    _rewards(conv)
    _rollout(conv, replicas, micro, steps, prompt)


def _grpo(conv: Conversion) -> None:
    scale, divisor = conv.given.get("scale_rewards", "group"), conv.get("loss_type")  # none: only centred
    level = conv.get("importance_sampling_level")
    if level not in ("token", "sequence"):
        conv.refuse("importance_sampling_level", "must be token or sequence", "Give one of them.")
    by_sequence = level == "sequence"
    by_group = scale in ("group", "true") or scale is True
    loss = "gspo" if by_sequence else "grpo" if by_group else "dr_grpo"
    conv.choose("loss", loss, "importance_sampling_level" if by_sequence else "scale_rewards")
    if scale == "batch":
        why = "the scores of a whole batch have one deviation there; here they are only centred, and no longer scaled"
        conv.differs("scale_rewards", why, Fate.INSTEAD)
    elif not by_group and scale not in ("none", None, False):
        conv.refuse("scale_rewards", "must be group, batch or none", "Give one of them.")
    if by_sequence and (divisor != "grpo" or not by_group):
        why = "loss=gspo is TRL's with loss_type=grpo and scale_rewards=group"
        conv.remark(Fate.OTHER, "importance_sampling_level", "sequence", why)
    known = isinstance(divisor, str) and divisor in DIVISORS
    conv.put("loss.normalize", DIVISORS[divisor] if known else "token", "loss_type")
    if not known:
        conv.differs("loss_type", "grpo, dapo and dr_grpo are here; dapo's divisor is taken", Fate.INSTEAD)
    if conv.number("beta") and "use_bias_correction_kl" in conv.by_name and conv.flag("use_bias_correction_kl"):
        conv.remark(Fate.OTHER, "beta", conv.get("beta"), "TRL 1.16 multiplies the divergence by the ratio, unless "
                    "use_bias_correction_kl is false; here it is k3 itself, as in TRL before")  # fmt: skip


def _rloo(conv: Conversion) -> None:
    conv.choose("loss", "rloo")
    conv.notes.append(
        "RLOO: the advantages are TRL's. TRL clips the ratio of the whole answer, rlexp the ratio of each token, and "
        "divides by rollout.max_new_tokens: with one step for each rollout the gradients differ by that factor alone."
    )


def _ppo(conv: Conversion) -> None:
    conv.choose("loss", "ppo")
    conv.put("loss.value_lr", None, why="learning_rate is the critic's too")
    for key in ("clip_low", "clip_high"):
        conv.put(f"loss.{key}", conv.number("cliprange"), "cliprange")
    if (penalty := conv.number("missing_eos_penalty")) is not None:
        conv.put("rollout.overlong", "penalty", "missing_eos_penalty")
        conv.put("rollout.overlong_penalty", penalty, "missing_eos_penalty")
    whole = " Theirs is trained whole, ours has an adapter too." if conv.flag("use_peft") else ""
    conv.notes.append(
        f"PPO: TRL's critic begins as the reward model, ours with the policy's weights (loss.critic).{whole}"
    )


def _rewards(conv: Conversion) -> None:
    terms: Rewards = {}
    files, functions = set[str](), conv.texts("reward_funcs")
    for name in functions:
        module, _, function = name.rpartition(".")
        terms[_unused(terms, name)] = {"kind": "python", "function": f"{module or 'rewards'}:{function}"}
        files.add(f"{(module or 'rewards').replace('.', '/')}.py")
    model = conv.text("reward_model_name_or_path", None if terms or conv.trainer != "ppo" else "EleutherAI/pythia-160m")
    if model is not None:
        terms[_unused(terms, "model")] = {"kind": "model", "path": model}
    if not terms:
        why = "so is a reward model; without them nothing scores an answer"
        conv.missing("reward_funcs", why, "my_rewards.score")
    names = ["reward_funcs"] * bool(functions) + ["reward_model_name_or_path"] * (model is not None)
    if functions:
        conv.notes.append(
            f"Rewards: {conv.framework} calls f(completions, …, **columns), rlexp f(prompts, answers, rows). "
            f"Write {' and '.join(sorted(files))} with functions of our form, which call the old ones: docs/rewards.md."
        )
    weights = conv.weights("reward_weights", len(terms), "reward")
    weights = weights or ([1.0] * len(terms) if len(terms) > 1 else [])
    put_rewards(conv, terms, weights, names, "reward_weights")


def put_rewards(conv: Conversion, terms: Rewards, weights: Sequence[float], by: Sequence[str], weighs: str) -> None:
    """Set a sum of rewards with their weights, or the only one, which has none."""
    conv.choose("reward", "sum" if weights else next(iter(terms.values()))["kind"], *by)
    for place, (name, term) in enumerate(terms.items()):
        for key, value in term.items():
            if weights or key != "kind":
                conv.put(f"reward.terms.{name}.{key}" if weights else f"reward.{key}", value, *by)
        if weights:
            conv.put(f"reward.terms.{name}.weight", weights[place], weighs)


def _unused(terms: Rewards, name: str) -> str:
    """Return a name for a term of a reward: the last part of its path, or of more parts if two end alike."""
    parts = [re.sub(r"\W", "_", part) for part in name.split(".")]
    names = ["_".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    names += [f"{names[-1]}{number}" for number in range(2, len(terms) + 3)]
    return next(each for each in names if each not in terms)


def _rollout(conv: Conversion, replicas: int, micro: int, steps: int, limit: str) -> None:
    """Set the sizes of a rollout, in prompts and answers, from the sizes of one GPU."""
    batch, ppo = micro * steps * replicas, conv.trainer == "ppo"
    answers = 1 if ppo else int(conv.whole("num_generations"))
    drawn = batch if ppo else _generation(conv, micro * replicas, steps)
    if ppo:
        conv.put("rollout.n_samples", 1)
        _episodes(conv, batch)
    if drawn % answers:
        raise ConvertError(
            f"{conv.spelled('num_generations')}={answers}: does not divide the {drawn} answers of a rollout "
            f"(per_device_train_batch_size × steps_per_generation × GPUs). TRL would refuse it too; check --gpus."
        )
    sized = [name for name in ("steps_per_generation", "generation_batch_size") if not ppo and conv.name(name)]
    conv.put("rollout.batch_size", drawn // answers, *sized, why=f"prompts: {drawn} answers / {answers}")
    prompt = conv.whole(limit, least=1)
    why = "" if prompt else f"theirs has no limit of prompts; {LONG} tokens are allowed here"
    conv.put("data.max_length", conv.whole("max_completion_length") + (prompt or LONG), limit, why=why)
    window = next((name for name in WINDOWS if conv.name(name)), None)
    if window and (conv.whole(window) or math.inf) < conv.values["data.max_length"].value:
        conv.differs(window, "prompt and answer together are no longer there: data.max_length")
    if prompt and limit == "max_prompt_length":
        conv.put("data.too_long", "truncate", limit, why="the start of a longer prompt is cut, as there")


def _engine(conv: Conversion) -> None:
    """Generate by vLLM, and weigh its samples as TRL does by default; only the mode token_truncate is here."""
    if not conv.flag("use_vllm"):
        return
    conv.choose("rollout", "default")
    conv.put("rollout.engine", "vllm", "use_vllm")
    if conv.get("vllm_mode") == "server":
        conv.tell(Fate.OTHER, "vllm_mode", "rollout=pipelined gives some ranks to sampling, one rollout ahead")
    names = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
             "vllm_importance_sampling_clip_max")  # fmt: skip
    if names[0] not in conv.by_name or not conv.flag(names[0]):
        return
    mode, cap = conv.text(names[1]), conv.number(names[2])
    if mode == "token_truncate":
        conv.put("rollout.importance_cap", cap, *names)
        return
    why = f"{mode} drops answers whose weight is above {cap:g}; rollout.importance_cap limits each token's weight"
    if conv.name(names[1]) is None:
        conv.differs(names[1], why, Fate.ABSENT)
    for name in names:
        conv.tell(Fate.ABSENT, name, why)


def _generation(conv: Conversion, forward: int, steps: int) -> int:
    """Return the answers that TRL draws at once, as a whole number of train batches."""
    each = int(conv.whole("steps_per_generation", steps))
    if (size := conv.whole("generation_batch_size")) is not None:
        each = size // forward
    if each < steps:
        return forward * steps  # the weights do not change between the generations of a step
    if each % steps:
        argument = f"generation_batch_size={size}" if size is not None else f"steps_per_generation={each}"
        raise ConvertError(
            f"{argument}: is no multiple of gradient_accumulation_steps={steps}, so that a step "
            f"would take samples of two generations. rlexp has whole train batches of one rollout: give a multiple."
        )
    if each > steps and conv.trainer == "grpo" and conv.get("loss_type") == "dapo" and conv.framework == "TRL":
        why = f"TRL divides dapo's loss by the tokens of all {each // steps} train batches: its gradients are smaller"
        conv.remark(Fate.OTHER, conv.name("generation_batch_size") or "steps_per_generation", size or each, why)
    return forward * each


def _episodes(conv: Conversion, batch: int) -> None:
    passes = int(conv.whole("num_ppo_epochs"))
    for key, what in (("checkpoint.save_every", "save"), ("train.eval_every", "eval")):
        if (every := conv.values.get(key)) is not None and str(every.value).isdecimal() and passes > 1:
            steps = type(every.value)(int(every.value) * passes)
            conv.put(key, steps, f"{what}_steps", f"{what}_strategy", why="theirs counts rollouts")
    if (episodes := conv.whole("total_episodes")) is not None:
        conv.values.pop("train.epochs", None)
        count = -(-int(episodes) // batch) * passes
        conv.put("train.max_steps", count, "total_episodes", "num_ppo_epochs")

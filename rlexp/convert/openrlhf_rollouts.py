"""OpenRLHF's trainer that draws samples, `train_ppo_ray`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from rlexp.convert import kinds
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.launchers import COUNTED, ONE_NODE
from rlexp.convert.rules import Fate, Rule, absent, for_trainers, needless, other, taken, worked_out
from rlexp.convert.trl_rollouts import put_rewards

# Their estimator of advantages, and the loss here that has it.
ESTIMATORS = {"gae": "ppo", "reinforce": "reinforce_pp", "reinforce_baseline": "dr_grpo", "rloo": "rloo",
              "group_norm": "grpo", "dr_grpo": "dr_grpo"}  # fmt: skip
CRITIC = "the advantage_estimator does not use it"
BY_GROUP = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")

RULES: Sequence[Rule] = for_trainers(
    "ppo",
    # samples
    taken("rollout.batch_size rollout_batch_size", "rollout.batch_size", "prompts, as in rlexp", default=1024, least=1),
    taken("rollout.n_samples_per_prompt n_samples_per_prompt", "rollout.n_samples", default=1, least=1),
    taken("rollout.micro_batch_size micro_rollout_batch_size", "rollout.score_batch_size"),
    taken("rollout.max_new_tokens max_new_tokens generate_max_len", "rollout.max_new_tokens"),
    taken("rollout.temperature temperature", "rollout.temperature", default=1.0),
    taken("rollout.top_p top_p", "rollout.top_p", default=1.0),
    taken("train.num_episodes num_episodes", "train.epochs", "passes over the prompts", default=1),
    needless("train.dynamic_batch_enable use_dynamic_batch train.max_tokens_per_gpu train_max_tokens_per_gpu "
             "rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu",
             "the batch of a step is the same whatever a micro-batch holds"),
    needless("vllm.sync_backend vllm_sync_backend vllm.enforce_eager enforce_eager "
             "vllm_sync_with_ray vllm.enable_prefix_caching enable_prefix_caching vllm_generate_batch_size "
             "rollout.vllm_generate_batch_size vllm.vllm_generate_batch_size ref.num_nodes ref.num_gpus_per_node "
             "ref_num_nodes ref_num_gpus_per_node critic.num_nodes critic.num_gpus_per_node critic_num_nodes "
             "critic_num_gpus_per_node reward.num_nodes reward.num_gpus_per_node reward_num_nodes "
             "reward_num_gpus_per_node train.colocate_all colocate_all_models train.colocate_actor_ref "
             "colocate_actor_ref train.colocate_critic_reward colocate_critic_reward",
             "all models are on the same ranks here"),
    worked_out("actor.num_nodes actor_num_nodes", "launch.nodes", rest=ONE_NODE),
    worked_out("actor.num_gpus_per_node actor_num_gpus_per_node", "launch.nproc", rest=COUNTED),
    taken("vllm.enable_sleep vllm_enable_sleep", "rollout.vllm_sleep", default=False),
    worked_out("vllm.num_engines vllm_num_engines", "rollout.engine=vllm", "each rank has its own", default=0, least=0),
    absent("vllm.tensor_parallel_size vllm_tensor_parallel_size", "rlexp does not split a model to sample", 1),
    taken("vllm.gpu_memory_utilization vllm_gpu_memory_utilization", "rollout.vllm_memory"),
    other("train.async_enable async_train", "rollout=pipelined", "some ranks generate the next rollout meanwhile"),
    absent("train.partial_rollout_enable partial_rollout train.async_queue_size async_queue_size",
           "a rollout is generated whole"),
    absent("train.agent_func_path agent_func_path", "no agents of several turns"),
    # rewards
    worked_out("reward.model_name_or_path reward_pretrain", "reward=model, reward.path",
               "its head must be called `score`", "the function decides", split=","),
    worked_out("reward.remote_url remote_rm_url", "reward=python, reward.function",
               "the function gets other arguments: docs/rewards.md"),
    other("critic.model_name_or_path critic_pretrain", "loss.critic", "the critic starts as the policy"),
    absent("reward.normalize_enable normalize_reward", "rlexp normalizes advantages"),
    absent("reward.clip_range reward_clip_range", "scores are not clipped", [-10, 10]),
    absent("reward.overlong_buffer_len overlong_buffer_len reward.overlong_penalty_factor overlong_penalty_factor "
           "reward.stop_properly_penalty_coef stop_properly_penalty_coef", "use rollout.overlong"),
    absent("ds.value_head_prefix value_head_prefix", "the head must be called `score`", "score", of="ppo rm"),
    # the loss
    worked_out("algo.advantage.estimator advantage_estimator", "loss", "gae is ppo, group_norm is grpo, …",
               default="gae"),
    worked_out("actor.policy_loss_type policy_loss_type", "loss=gspo", default="ppo"),
    taken("algo.kl.init_coef init_kl_coef", "loss.beta", default=0.01),
    taken("algo.kl.estimator kl_estimator", "loss.kl", default="k1"),
    taken("algo.kl.use_loss use_kl_loss", "loss.kl_in", default=False,
          to=lambda value: "loss" if kinds.flag(value) else "reward"),
    other("algo.kl.target kl_target algo.kl.horizon kl_horizon", "loss.kl_target",
          "theirs is per token, rlexp's per answer"),
    worked_out("actor.eps_clip eps_clip", "loss.clip_low, loss.clip_high", rest="eps_clip_low_high decides",
               default=0.2),
    worked_out("actor.eps_clip_low_high eps_clip_low_high", "loss.clip_low, loss.clip_high", default=(0.2, 0.2)),
    taken("actor.dual_clip dual_clip", "loss.dual_clip"),
    taken("critic.value_clip value_clip", "loss.value_clip", default=0.5, rest=CRITIC),
    taken("critic.adam.lr critic_learning_rate", "loss.value_lr", default=9e-6, rest=CRITIC),
    needless("critic.adam.betas critic.adam.eps critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio "
             "critic.min_lr_ratio critic.max_norm critic.optim critic.save_value_network "
             "critic.gradient_checkpointing_enable", "the critic is optimized with the policy"),
    taken("algo.advantage.gamma gamma", "loss.gamma", default=1.0, rest=CRITIC),
    taken("algo.advantage.lambd lambd", "loss.lam", default=1.0, rest=CRITIC),
    absent("algo.advantage.no_std_norm no_advantage_std_norm", "rlexp divides advantages by their deviation"),
    worked_out("algo.advantage.is_correction_enable enable_vllm_is_correction", "rollout.importance_cap",
               "weighs samples that vLLM generated"),
    worked_out("algo.advantage.is_correction_type vllm_is_correction_type", "rollout.importance_cap",
               "tis; others are missing", "no weight is asked for", default="tis"),
    worked_out("algo.advantage.is_correction_threshold vllm_is_truncated_threshold", "rollout.importance_cap",
               "the upper limit", "no weight is asked for", default=(0.5, 5.0)),
    absent("use_icepop", "rlexp drops no tokens"),
    taken("actor.entropy_coef entropy_loss_coef", "loss.entropy"),
    absent("ptx_coef pretrain_data pretrain_data_probs", "no language-model loss is added", 0.05),
    absent("actor.freezing_steps freezing_actor_steps critic.freezing_steps", "both train from the start", -1),
    worked_out("algo.dynamic_filtering_enable dynamic_filtering", "loss.filter=true",
               "rlexp replaces no left-out prompts"),
    absent("algo.dynamic_filtering_range dynamic_filtering_reward_range", "rlexp leaves out prompts with equal scores",
           [0, 1]),
    absent("eval.temperature eval_temperature eval.n_samples_per_prompt eval_n_samples_per_prompt",
           "held-out prompts are sampled like the others"),
)  # fmt: skip


def convert(conv: Conversion) -> int:
    """Set the rollout, the loss and the reward; return the steps that are taken on a rollout."""
    steps = _rollout(conv)
    _loss(conv)
    _reward(conv)
    return steps


def _rollout(conv: Conversion) -> int:
    """Set the sizes of a rollout; return the steps that are taken on it."""
    answers = int(conv.whole("rollout_batch_size")) * int(conv.whole("n_samples_per_prompt"))
    batch, passes = int(conv.whole("train_batch_size", least=1)), int(conv.whole("max_epochs"))
    if answers % batch:
        raise ConvertError(
            f"{conv.spelled('train_batch_size')}={batch}: does not divide the {answers} answers of a rollout. OpenRLHF "
            f"drops the rest; rlexp takes whole train batches: give one that divides."
        )
    conv.put("rollout.epochs", passes, "max_epochs")
    if conv.name("generate_max_len") is None:
        if conv.name("prompt_max_len") is not None:
            conv.put("rollout.max_new_tokens", 1024, "generate_max_len")
        else:
            why = f"theirs is what a prompt leaves of {conv.whole('max_len')} tokens; here it is fixed"
            conv.put("rollout.max_new_tokens", conv.whole("max_len") // 2, why=why)
    if conv.whole("vllm_num_engines"):
        conv.put("rollout.engine", "vllm", "vllm_num_engines")
    _importance(conv)
    return passes * answers // batch


def _importance(conv: Conversion) -> None:
    """Weigh samples of vLLM, if the file asks for it: the type tis is here, up to its upper threshold."""
    enable, kind, limit = "enable_vllm_is_correction", "vllm_is_correction_type", "vllm_is_truncated_threshold"
    low, high = (0.0, conv.number(limit)) if kinds.is_number(conv.get(limit)) else conv.pair(limit)
    if not conv.flag(enable):
        return
    if conv.text(kind) != "tis":
        for name in (kind, enable, limit):
            conv.tell(Fate.ABSENT, name, "only the type tis is here: rollout.importance_cap")
        return
    conv.put("rollout.importance_cap", high, limit, enable, kind)
    if low:
        conv.remark(Fate.ABSENT, conv.name(limit) or limit, low, "a weight has no lower limit")


def _loss(conv: Conversion) -> None:
    estimator = conv.text("advantage_estimator")
    if estimator not in ESTIMATORS:
        also = " (group_norm is GRPO's)" if estimator == "grpo" else ""
        conv.refuse("advantage_estimator", "is none of OpenRLHF's", f"Known are {', '.join(ESTIMATORS)}{also}.")
    gspo = conv.text("policy_loss_type") == "gspo"
    loss = "gspo" if gspo and estimator == "group_norm" else ESTIMATORS[estimator]
    conv.choose("loss", loss, "advantage_estimator", "policy_loss_type")
    if gspo and estimator != "group_norm":
        conv.differs("policy_loss_type", "loss=gspo takes the advantages of group_norm", Fate.INSTEAD)
    divisor = conv.default("loss.normalize", "token")
    of = "all tokens of the batch" if divisor == "token" else "each answer's tokens"
    apart = divisor == "token" and conv.versions.older("0.10.3")
    whose = "theirs is over each micro-batch's" if apart else "as theirs"
    conv.put("loss.normalize", divisor, why=f"the mean over {of}, {whose}")
    whitens = estimator in ("gae", "reinforce", "reinforce_baseline")
    conv.put("loss.whiten", whitens, "advantage_estimator", why="over a train batch; theirs over the rollout" * whitens)
    if estimator in BY_GROUP and not conv.flag("use_kl_loss") and conv.number("init_kl_coef"):
        conv.differs("advantage_estimator", "without use_kl_loss theirs subtracts the divergence of each token after "
                     "the baseline, ours subtracts the answer's before it")  # fmt: skip
    clip = "eps_clip_low_high" if conv.name("eps_clip_low_high") else "eps_clip"
    low, high = [conv.number(clip)] * 2 if clip == "eps_clip" else conv.pair(clip)
    conv.put("loss.clip_low", low, clip)
    conv.put("loss.clip_high", high, clip)
    if loss == "ppo":
        conv.put("loss.value_coef", 1.0, why="theirs adds the critic's loss as it is")
        if conv.get("critic_pretrain") or conv.get("reward_pretrain"):
            conv.notes.append(
                "PPO: OpenRLHF's critic begins as the reward model or as critic_pretrain, ours with the policy's "
                "weights (loss.critic)."
            )
    elif estimator == "reinforce" and conv.number("gamma") != 1:
        conv.tell(Fate.ABSENT, "gamma", f"loss={loss} discounts no reward")
    if conv.flag("dynamic_filtering"):
        conv.put("loss.filter", True, "dynamic_filtering", why="no other prompts replace them")


def _reward(conv: Conversion) -> None:
    models, function = conv.texts("reward_pretrain"), conv.text("remote_rm_url")
    if function is not None and function.endswith(".py"):
        module = PurePosixPath(function).stem
        put_rewards(conv, {"": {"kind": "python", "function": f"{module}:rewards"}}, [], ["remote_rm_url"], "")
        conv.notes.append(
            f"Rewards: OpenRLHF calls reward_func(queries, prompts, labels), rlexp f(prompts, answers, rows). Put a "
            f"function `rewards` of our form into {module}.py, which calls the old one: docs/rewards.md."
        )
    elif function is not None:
        conv.refuse("remote_rm_url", "rlexp asks no reward behind an address", "Give a model, or a function of Python.")
    elif not models and conv.get("agent_func_path") is not None:
        conv.refuse("agent_func_path", "an agent scores the answers, in several turns, which rlexp lacks",
                    "Give a reward model, or a function of Python.")  # fmt: skip
    elif not models:
        why = "so is remote_rm_url; without them nothing scores an answer"
        conv.missing("reward_pretrain", why, "org/reward")
    else:
        terms = {f"model{number}": {"kind": "model", "path": path} for number, path in enumerate(models, start=1)}
        weights = [1 / len(models)] * len(models) if models[1:] else []
        put_rewards(conv, terms, weights, ["reward_pretrain"], "reward_pretrain")

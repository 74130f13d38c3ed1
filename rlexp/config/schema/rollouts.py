"""The keys of reinforcement learning: how answers are generated (`rollout`), and how they are scored (`reward`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from rlexp.config.schema.bounds import MANY, WEEK, number
from rlexp.config.schema.data import PROMPT_AND_ANSWER
from rlexp.config.schema.models import Precision

LIKELIEST = " (with 0, all answers to a prompt would be the same)"


class RolloutMode(Enum):
    colocated = "colocated"  # all ranks sample, then all train
    pipelined = "pipelined"  # some ranks sample the next rollout while the others train


class RolloutEngine(Enum):
    native = "native"  # rlexp's own sampling, with the engine's weights
    vllm = "vllm"  # vLLM; it must be installed


class Overlong(Enum):
    """How an answer that reaches rollout.max_new_tokens without an end is handled."""

    keep = "keep"  # trained on like any other answer
    mask = "mask"  # not trained on; its score still counts in the mean of its prompt's answers
    penalty = "penalty"  # rollout.overlong_penalty is subtracted from its score


class RuleName(Enum):
    count = "count"  # occurrences of reward.text (without overlaps) / reward.most, at most 1
    length = "length"  # 1 − |characters − reward.target| / reward.target, at least 0
    regex = "regex"  # share of the answer's characters that reward.pattern matches
    exact = "exact"  # 1 if the answer equals the row's answer, without the white space around either
    arithmetic = "arithmetic"  # 1 if the answer's last number is right: the row's answer, or else the prompt's sum


@dataclass
class RolloutConfig:
    mode: RolloutMode = RolloutMode.colocated  # which ranks generate the samples, and when
    engine: RolloutEngine = RolloutEngine.native  # the code that generates the samples
    batch_size: int = number(8, least=1, most=MANY)  # prompts of a rollout
    n_samples: int = number(4, least=1, most=MANY)  # answers to each prompt
    epochs: int = number(1, least=1)  # passes over the samples of a rollout before the next rollout
    minibatches: int = MISSING  # train batches in a rollout; derived, cannot be set
    micro_batch_size: int = number(16, least=1)  # samples that a rank generates at once
    # limit on the tokens of the samples generated at once, where padding counts and each answer counts as
    # rollout.max_new_tokens; null: no limit
    micro_batch_tokens: int | None = number(None, least=1)
    # answers in one forward pass of a ring, when answers are scored; null: as many tokens as
    # train.max_tokens_per_micro_batch says, or 8 answers without data.packing
    score_batch_size: int | None = number(None, least=1)
    max_new_tokens: int = number(64, least=1)  # limit on the tokens of an answer
    # the logits are divided by it, in sampling and in training
    temperature: float = number(1.0, above=0, why=LIKELIEST)
    top_k: int = number(0, least=0)  # draw from the k likeliest tokens only; 0: from all
    # draw from the likeliest tokens that together have this probability; 1: from all
    top_p: float = number(1.0, above=0, most=1)
    # draw only tokens whose probability is at least this fraction of the likeliest token's; 0: all
    min_p: float = number(0.0, least=0, most=1)
    # an answer ends at the first of these texts that it contains; the reward does not see that text
    stop: list[str] = field(default_factory=list)
    overlong: Overlong = Overlong.keep  # how an answer that reaches rollout.max_new_tokens without an end is handled
    # subtracted from the score of an answer that is too long, with rollout.overlong=penalty
    overlong_penalty: float = number(1.0, least=0)
    # limit on a token's importance weight, which corrects for samples of older weights or of vLLM; null: no such
    # weight
    importance_cap: float | None = number(None, above=0)
    # share of a GPU's memory that vLLM may take, with rollout.engine=vllm, or on CPU: share of the machine's memory for
    # its keys and values; auto: what training leaves, or on CPU what a rollout needs
    vllm_memory: int | float | str = number("auto", above=0, below=1)
    # give vLLM's memory back while the ranks train, with rollout.engine=vllm
    vllm_sleep: bool = False
    sampling_ranks: int = MISSING  # ranks that only sample; 0 unless pipelined
    # number of rollouts after which samples are shown again, in the terminal and in W&B; 0: never
    show_every: int = number(10, least=0)
    show: int = number(3, least=0)  # samples to show each time


@dataclass
class RewardConfig:
    name: str = MISSING  # the kind of the reward, chosen by reward=NAME


@dataclass
class RuleRewardConfig(RewardConfig):
    name: str = "rule"
    rule: RuleName = RuleName.count  # what is scored
    text: str = ""  # the text to count, with reward.rule=count
    most: int = number(1, least=1)  # occurrences of reward.text that score 1, with reward.rule=count
    target: int = number(100, least=1)  # characters of an answer that scores 1, with reward.rule=length
    pattern: str = ""  # a regular expression of Python, with reward.rule=regex
    ignore_case: bool = False  # take upper and lower case as equal, with reward.rule=count, regex or exact


@dataclass
class PythonRewardConfig(RewardConfig):
    """A function of the user, named by its import path and run in processes of its own."""

    name: str = "python"
    function: str = MISSING  # the import path of a function of your own: `package.module:function`. Its code is run
    timeout_seconds: float = number(60.0, above=0, most=WEEK)  # seconds for one call of the function
    workers: int = number(1, least=1, most=4096)  # processes for each rank, which call the function


@dataclass
class ModelRewardConfig(RewardConfig):
    name: str = "model"
    path: str = MISSING  # the reward model: a folder, or a hub name
    precision: Precision = Precision.fp32  # the numbers that the reward model computes with
    # limit on the tokens of prompt and answer, for a reward model with a tokenizer of its own; null: data.max_length
    max_length: int | None = number(None, least=2, why=PROMPT_AND_ANSWER)
    trust_remote_code: bool = False  # run Python code that comes with the reward model


@dataclass
class SumRewardConfig(RewardConfig):
    """A weighted sum. Each term has a name of its own and the keys of its kind: `{kind: rule, weight: 1.0, …}`."""

    name: str = "sum"
    # the rewards to add up, each under a name of its own: `{NAME: {kind: rule, weight: 1.0, …}}`
    terms: dict[str, Any] = field(default_factory=dict)

"""Reward models over the ring, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlexp.base.errors import ModelError, RewardError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.models import Precision
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import get_layout
from rlexp.training.types import Sample
from rlexp.training.world.groups import ALONE, Ring, build_world
from tests.conftest import Shell
from tests.helpers.ranks import on_ranks
from tests.helpers.rewards import TOKENIZER, ids, sample
from tests.oracles.pairs import Writer, cut
from tests.oracles.rows import Asked

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}  # fmt: skip
TEXTS = [("What now?", "Nothing at all."), ("a", ""), ("Tell me of the harbour, please.", "No"), ("b" * 37, "c" * 50)]


def saved(path: Path, labels: int = 1) -> Path:
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=labels)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def reward_model(path: Path, tokenizer: object = TOKENIZER, **keys: object) -> RewardModel:
    return RewardModel(ModelRewardConfig(path=str(path), **keys), "reward", tokenizer, 512, torch.device("cpu"))


def scores_over(model: RewardModel, ring: Ring, drawn: Sequence[Sample]) -> list[float]:
    layout = get_layout("zigzag")
    pack = pack_sequences([model.encode(each) for each in drawn], layout.multiple(ring.size))
    shard = shard_pack(pack, ring, layout, CpuFlash(), model.max_length)
    return ring_sum(model(shard, pack.end_S), ring).tolist()


def ring_scores(spec: RankSpec, path: Path) -> list[list[float]]:
    """Score the samples in one pack, then each in its own pack, then no sample."""
    ring = build_world(spec.world_size).ring
    model = reward_model(path, precision=Precision.fp64)
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    alone = [score for each in drawn for score in scores_over(model, ring, [each])]
    return [scores_over(model, ring, drawn), alone, scores_over(model, ring, [])]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("reward") / "llama")


@pytest.mark.parametrize("ring_size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_reward_model_says_over_a_ring_what_transformers_says(llama: Path, ring_size: int) -> None:
    plain = AutoModelForSequenceClassification.from_pretrained(llama, dtype=torch.float64, attn_implementation="sdpa")
    batch = TOKENIZER([prompt + answer for prompt, answer in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad(), precise(torch.float64):
        expected = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    assert expected.std() > 1e-2
    for packed, alone, nothing in on_ranks(ring_size, ring_scores, llama):
        assert packed == pytest.approx(expected.tolist(), rel=0, abs=1e-10)
        assert alone == pytest.approx(expected.tolist(), rel=0, abs=1e-10)
        assert nothing == []


def bytes_sent(spec: RankSpec, cfg: Config) -> int:
    """Return what this rank sends while a reward model scores short answers."""
    from rlexp.training.train.build import build
    from rlexp.training.train.surroundings import UNPROBED, ring_reward_model

    run = build(cfg, around=UNPROBED).run
    model = ring_reward_model(run, *reward_terms(cfg.reward), probing=UNPROBED.probe)
    before = run.world.ring.traffic.sent
    model.score(run.pack([model.encode(sample(answer, prompt)) for prompt, answer in TEXTS]))
    return run.world.ring.traffic.sent - before


@pytest.mark.parametrize(("cut", "sends"), [("auto", False), ("all", True)])
def test_a_short_sequence_is_scored_whole_by_one_rank(llama: Path, cut: str, sends: bool) -> None:
    cfg = compose_config(["launch.device=cpu", "launch.nproc=2", "parallel=ring2", f"parallel.cut={cut}", "loss=grpo",
                          "data=arithmetic", "engine=torch", "logger=none", "reward=model",
                          f"reward.path={llama}"])  # fmt: skip
    assert [sent > 0 for sent in on_ranks(2, bytes_sent, cfg)] == [sends, sends]


def test_a_reward_model_keeps_its_own_dtype(llama: Path) -> None:
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    exact = scores_over(reward_model(llama, precision=Precision.fp64), ALONE, drawn)
    half = reward_model(llama, precision=Precision.bf16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in half.parameters())
    gap = np.abs(np.array(scores_over(half, ALONE, drawn)) - np.array(exact)).max()
    assert 1e-6 < gap < 0.05, gap  # bf16 has 8 bits; measured 0.004


def test_a_foreign_tokenizer_reads_the_texts(llama: Path) -> None:
    """The policy's tokenizer has one more token, so its ids mean something else and the texts are tokenized again."""
    foreign = byte_tokenizer()
    foreign.add_tokens(["<more>"])
    model = reward_model(llama, foreign, max_length=20)
    prompt, answer = model.encode(sample("yes", "abc"))
    assert TOKENIZER.decode(prompt) == "abc"
    assert TOKENIZER.decode(answer) == "yes<eos>"
    prompt, answer = model.encode(sample("yes", "x" * 30 + "end"))
    assert TOKENIZER.decode(prompt) == "x" * 13 + "end"
    assert len(model.encode(sample("y" * 18))[0]) == 1  # as many tokens as there is room
    with pytest.raises(RewardError, match=r"rows.jsonl:1 is an answer of 31 of its tokens, and reward.max_length=20"):
        model.encode(sample("y" * 30))
    same = reward_model(llama)
    drawn = sample("yes", "abc")
    assert same.encode(drawn) == (drawn.example.prompt, drawn.answer)
    with pytest.raises(ModelError, match=r"reward.max_length=20: .* the policy's tokens, .* data.max_length=512"):
        reward_model(llama, max_length=20)


def test_what_is_no_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reward.path=.*: has 2 labels \(LABEL_0, LABEL_1\)"):
        reward_model(saved(tmp_path / "labels", 2))
    LlamaForCausalLM(LlamaConfig(**LLAMA, num_labels=1)).save_pretrained(tmp_path / "causal")
    with pytest.raises(ModelError, match=r"reward.path=.*causal: is a LlamaForCausalLM, which has no head that gives"):
        reward_model(tmp_path / "causal")
    with pytest.raises(ModelError, match=r"reward.path=.*nowhere: no reward model can be loaded"):
        reward_model(tmp_path / "nowhere")
    config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
                        vocab_size=300, num_labels=1)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"BertForSequenceClassification has no linear head `score`"):
        reward_model(tmp_path / "bert")


def test_a_reward_model_with_learned_positions(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=len(TOKENIZER), num_labels=1, pad_token_id=2)
    torch.manual_seed(0)
    plain = GPT2ForSequenceClassification(config).double().eval()
    plain.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    model = reward_model(tmp_path, precision=Precision.fp64)
    text = torch.from_numpy(ids("a question and an answer")).long().unsqueeze(0)
    with torch.no_grad(), precise(torch.float64):
        expected = float(plain(input_ids=text).logits)
    assert scores_over(model, ALONE, [sample(" and an answer", "a question")]) == pytest.approx([expected], abs=1e-10)


@pytest.mark.slow
def test_a_reward_model_whose_heads_the_policys_layout_cannot_share_out(rlexp: Shell, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}, num_labels=1
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    said = []
    for number, (ring, layout) in enumerate(((1, "zigzag"), (2, "ulysses"))):
        answer = rlexp(
            "launch.device=cpu", f"parallel=ring{ring}", f"launch.nproc={ring}", f"parallel.layout={layout}",
            "loss=ppo", "data=arithmetic", "engine=torch", "train.precision=fp64", "train.max_steps=1", "logger=none",
            "checkpoint.export=false", "reward=model", f"reward.path={tmp_path / 'judge'}", "reward.precision=fp64",
            f"hydra.run.dir=run{number}",
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        (row,) = (tmp_path / f"run{number}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        said.append(json.loads(row)["train/reward/model"])
    assert said[1] == pytest.approx(said[0], rel=0, abs=1e-12)


FRAMES = ("{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
          "{% if add_generation_prompt %}<bos>assistant: {% endif %}")  # fmt: skip


@pytest.mark.parametrize("template", [None, FRAMES], ids=["plain", "template"])
def test_a_foreign_model_reads_the_tokens_of_the_second_writing(llama: Path, template: str | None) -> None:
    """Also where a prompt is too long for it, and loses its start."""
    foreign = byte_tokenizer()
    foreign.add_tokens(["<more>"])
    model = reward_model(llama, foreign, max_length=70)
    assert model.texts is not None
    tokenizer = model.texts.tokenizer
    tokenizer.chat_template = template
    cut_ones = 0
    for prompt, answer in TEXTS:
        whole = Writer(tokenizer).example(Asked(prompt, (answer,), "here"), ["answer"])
        meant = cut(whole, 70, tokenizer.bos_token_id)
        expected = (meant.prompt.tolist(), meant.answers["answer"].tolist())
        assert tuple(part.tolist() for part in model.encode(sample(answer, prompt))) == expected
        cut_ones += len(meant.prompt) < len(whole.prompt)
    assert cut_ones

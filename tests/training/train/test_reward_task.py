"""A reward model: its head comes from the seed on any engine, and plain transformers gives it the same scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig

from rlexp.base.errors import ModelError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HFModelConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.model.loading import byte_tokenizer, load_config, load_model, load_tokenizer
from rlexp.training.model.score_head import padding_of
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.examples import read_examples
from rlexp.training.train.export_at_end import export_run
from rlexp.training.train.loop import train_loop
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.world.groups import ALONE, World
from tests.helpers.models import saved
from tests.helpers.ranks import on_ranks

BASE = ("launch.device=cpu", "logger=none", "loss=reward", "data.size=16", "data.eval_size=5", "train.batch_size=8",
        "train.max_steps=2", "train.eval_every=2", "optim.lr=1e-3")  # fmt: skip


def trained_rank(_spec: RankSpec, cfg: Config, place: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Train and export; return the held-out values after the last step, and the weights before the first."""
    last: dict[str, float] = {}

    class Keeping(Sink):
        def log(self, row: dict) -> None:
            last.update(row)

    task = build(cfg, around=UNPROBED)
    before = {name: weight.clone() for name, weight in task.run.engine.weights()}
    train_loop(task, Sinks([Keeping()]))
    Path(place).mkdir(exist_ok=True)
    (Path(place) / "run.json").write_text("{}")
    export_run(task.run, Path(place), 2)
    return last, before


def mean_scores(cfg: Config, folder: Path) -> tuple[float, float]:
    """Return the mean scores of the held-out pairs by plain transformers, one sequence at a time."""
    examples = read_examples(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    assert model.config.architectures == ["LlamaForSequenceClassification"]

    def mean(side: int) -> float:
        sequences = [[*pair.prompt.tolist(), *pair.answers[side].tolist()] for pair in examples.held_out]
        with torch.no_grad():
            return sum(float(model(input_ids=torch.tensor([each])).logits) for each in sequences) / len(sequences)

    return mean(0), mean(1)


def test_plain_transformers_gives_the_same_scores(tmp_path: Path) -> None:
    """Trained on two replicas of a ring of 2, in float32."""
    cfg = compose_config([*BASE, "train.precision=fp32", "engine=torch", "parallel=ring2", "launch.nproc=4"])
    last, _ = on_ranks(4, trained_rank, cfg, str(tmp_path))[0]
    chosen, rejected = mean_scores(cfg, tmp_path / "model")
    # measured: 2e-8 and 3e-8, of scores of about 0.1
    assert last["eval/rewards/chosen"] == pytest.approx(chosen, abs=1e-6)
    assert last["eval/rewards/rejected"] == pytest.approx(rejected, abs=1e-6)
    assert abs(chosen - rejected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "zero2", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_head_is_the_same_on_every_engine(engine: str, precision: str, tmp_path: Path) -> None:
    """It comes from model.seed, also where a rank holds a part of it; the run's memory is saved in every way."""
    model = saved(tmp_path / "causal")
    words = [*BASE, "model=hf", f"model.path={model}", "model.seed=5", f"train.precision={precision}", "parallel=ring2",
             "launch.nproc=2", "memory.checkpointing=true", "data.max_length=256"]  # fmt: skip
    plain = compose_config([*words, "engine=torch"])
    (_, meant), _ = on_ranks(2, trained_rank, plain, str(tmp_path / "plain"))
    last, found = on_ranks(2, trained_rank, compose_config([*words, f"engine={engine}"]), str(tmp_path / "other"))[0]
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        assert torch.equal(weight.float(), found[name].float()), name
    assert float(meant["score.weight"].abs().max()) > 0
    chosen, _ = mean_scores(plain, tmp_path / "other" / "model")
    assert last["eval/rewards/chosen"] == pytest.approx(chosen, abs=1e-6 if precision == "fp32" else 0.02)


def test_another_seed_makes_another_head_and_a_head_of_the_files_is_kept(tmp_path: Path) -> None:
    causal = saved(tmp_path / "causal")
    one, same, other = (scored(causal, seed) for seed in (0, 0, 1))
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    assert torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)
    one.save_pretrained(tmp_path / "reward")
    again = scored(tmp_path / "reward", 7)
    assert torch.equal(one.score.weight, again.score.weight)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    model = scored(saved(tmp_path / "causal"), 0)
    model.config.num_labels = 3
    model.config.save_pretrained(tmp_path / "labels")
    with pytest.raises(ModelError, match=r"labels: has 3 labels \(LABEL_0, LABEL_1, LABEL_2\), and a reward is"):
        scored(tmp_path / "labels", 0)


def test_no_end_of_an_answer_is_the_padding_token() -> None:
    """transformers reads the score at the last token that is not padding."""
    tokenizer = byte_tokenizer()  # 0 begins, 1 ends, 2 pads

    def padding(pad: int | None, eos: int | list[int], **special: str | None) -> int | None:
        for name, token in special.items():
            setattr(tokenizer, f"{name}_token", token)
        return padding_of(LlamaConfig(vocab_size=259, pad_token_id=pad, eos_token_id=eos), tokenizer)

    assert padding(2, 1) == 2
    assert padding(1, [1, 2]) == 0  # the end of sequence, in a list: the begin-of-sequence token is none
    assert padding(1, 0) == 2  # the tokenizer's own end
    assert padding(None, 1) == 2
    tokenizer.chat_template = "{{ messages }}<pad>"
    assert padding(2, 1) == 0  # a template ends a turn with it
    assert padding(2, 1, bos=None) is None


def test_a_reward_model_is_no_language_model(tmp_path: Path) -> None:
    scored(saved(tmp_path / "causal"), 0).save_pretrained(tmp_path / "reward")
    cfg = HFModelConfig(path=str(tmp_path / "reward"))
    with pytest.raises(ModelError, match=r"model.path=.*reward: is a LlamaForSequenceClassification, whose head gives"):
        load_model(cfg, load_config(cfg, 64), 64)


def scored(path: Path, seed: int):
    cfg = HFModelConfig(path=str(path), seed=seed)
    return load_model(cfg, load_config(cfg, 64), 64, scores=True)

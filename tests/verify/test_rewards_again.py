"""Texts, ends and rewards by the reference, against the product's and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rlexp.verify.records import TokenPrompt
from rlexp.verify.reference.pairs import Bytes
from rlexp.verify.reference.reward_rules import last_number, rule_score, value_of_sum
from rlexp.verify.reference.rewards import Judged, asked_again, ended, ends_of, scored, text_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rlexp.base.errors import RewardError
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import (
    ModelRewardConfig,
    Overlong,
    PythonRewardConfig,
    RewardConfig,
    RolloutConfig,
    RuleName,
    RuleRewardConfig,
    SumRewardConfig,
)
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout import sampling
from rlexp.training.rollout.rewards import rule as built_in
from rlexp.training.rollout.rewards.rule import rule_of
from rlexp.training.train import build_rollouts
from rlexp.training.types import Sample
from rlexp.training.world.groups import ALONE
from tests.helpers.rewards import TOKENIZER, built, function, ids, sample, samples

CPU = torch.device("cpu")


def judged(
    cfg: RewardConfig,
    drawn: Sequence[Sample],
    terms: dict[str, Any] | None = None,
    tokenizer: Any = None,
    exact: bool = True,
) -> Judged:
    """Ask the reference about the product's samples. `terms`: what the run says; by default, what the product does."""
    prompts = [TokenPrompt(np.asarray(each.example.prompt, dtype=np.int64), each.example.origin, each.example.text,
                           each.example.expected) for each in drawn]  # fmt: skip
    return asked_again(
        cfg, prompts, [each.example.index for each in drawn], [each.text for each in drawn],
        [each.answer for each in drawn], by_product(cfg, drawn) if terms is None else terms,
        Bytes() if tokenizer is None else tokenizer, CPU, exact, 512,
    )  # fmt: skip


def by_product(cfg: RewardConfig, drawn: Sequence[Sample]) -> dict[str, np.ndarray]:
    with built(cfg) as rewards:
        rewards.submit(drawn)
        scores = rewards.judged(drawn, {})
    return {name: np.array([each.terms[name] for each in scores]) for name in scores[0].terms}


# ---- texts and ends ----


def real_tokenizer(shared: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared / "models" / "stories260K")


@pytest.mark.parametrize("kind", ["bytes", "byte tokenizer", "stories260K"])
def test_texts_and_ends_are_the_products(kind: str, shared: Path) -> None:
    """Random ids: bytes that are no UTF-8, special tokens anywhere, and texts that end an answer."""
    theirs = real_tokenizer(shared) if kind == "stories260K" else byte_tokenizer()
    ours, chance = Bytes() if kind == "bytes" else theirs, random.Random(1)
    common = [theirs(text, add_special_tokens=False).input_ids for text in ("ab", "é", "a", "漢", "b🙂", " \n", ".")]
    ends = cut = 0
    for _ in range(400):
        pieces = [[chance.randrange(len(theirs))] if chance.random() < 0.4 else chance.choice(common)
                  for _ in range(chance.randrange(8))]  # fmt: skip
        answer = [token for piece in pieces for token in piece]
        stop = chance.sample(["a", "ab", "é", "漢", " \n", "b🙂", ".*"], chance.randrange(4))
        text = sampling.text_of(theirs, answer, stop)
        assert text_of(ours, answer, stop) == text_of(ours, np.array(answer, dtype=np.int32), stop) == text
        cut += text != sampling.text_of(theirs, answer, [])
        ends += same_ends(theirs, ours, answer, [1, 5], stop)
    assert min(ends, cut) > 60


def same_ends(theirs: Any, ours: Any, answer: Sequence[int], ends: Sequence[int], stop: list[str]) -> bool:
    """Draw an answer token by token, and compare after each; return whether it ever ended."""
    drawer = sampling.Drawer(forward=lambda _: torch.zeros(0), tokenizer=theirs, ends=ends, seed=0, in_step=False,
                             cfg=RolloutConfig(stop=stop), device=CPU, dtype=np.dtype(np.float64))  # fmt: skip
    drawn, ever = sampling.Drawn([], [[]], [[]], [False]), False
    for place, token in enumerate(answer):
        drawer._note(drawn, [0], [token], [0.0])
        assert ended(ours, np.array(answer[: place + 1]), ends, stop) == drawn.stopped[0]
        ever |= drawn.stopped[0]
    return ever


def test_bytes_are_decoded_as_by_the_products_tokenizer() -> None:
    chance, theirs = random.Random(2), byte_tokenizer()
    for _ in range(1500):
        answer = [chance.randrange(259) for _ in range(chance.randrange(9))]
        assert text_of(Bytes(), answer, []) == theirs.decode(answer, skip_special_tokens=True)
    whole = "".join(map(chr, range(0x20, 0x500)))
    assert text_of(Bytes(), ids(whole), []) == whole


@pytest.mark.parametrize("named", [None, 7, [7, 2], [1]])
def test_the_ends_are_the_models_and_the_tokenizers(named: Any) -> None:
    class Model:
        generation_config = type("Generation", (), {"eos_token_id": named})

    ends = build_rollouts.ends_of(Model(), byte_tokenizer())
    assert ends_of(Model(), Bytes()) == ends_of(Model(), byte_tokenizer()) == ends
    assert ends_of(torch.nn.Identity(), Bytes()) == [1]


# ---- rules ----

PIECES = ["1", "07", "23", "456", "1,234", "9,", ",500", ".5", "2.25", "0", "3/4", "/0", "1/3", "-", "−", "(", ")", "x",
          " ", " ", " ", "\n", " + ", "+", "*", " × ", "/", "÷", "^", "=", "%", "!", ">", "_", "٣", "²", "é", ". ",
          "$"]  # fmt: skip


def text_with_numbers(chance: random.Random) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 10)))


def test_last_numbers_are_the_products() -> None:
    chance, found = random.Random(3), set()
    for _ in range(6000):
        text = text_with_numbers(chance)
        assert last_number(text) == built_in.last_number(text), text
        found.add(last_number(text))
    assert len(found) > 200
    for text in ("9" * 1000 + "/", "9" * 1001, "-" + "9" * 1000, "1/" + "2" * 998, "1/" + "2" * 999):
        assert last_number(text) == built_in.last_number(text)


def sum_at_the_end(chance: random.Random, depth: int = 2) -> str:
    if depth == 0 or chance.random() < 0.3:
        number = chance.choice(["3", "12", "1,000", "0.5", ".25", "007", "-2", "−4"])
        return number if chance.random() < 0.7 else f"({number})"
    sign = chance.choice(["+", "-", "−", "*", "×", "/", "÷"])
    space = chance.choice(["", " ", "\n"])
    both = f"{sum_at_the_end(chance, depth - 1)}{space}{sign}{space}{sum_at_the_end(chance, depth - 1)}"
    return chance.choice([both, f"({both})", f"-({both})", f"( {both} )"])


def test_sums_are_the_products() -> None:
    chance, worked_out = random.Random(4), 0
    around = ["", "", "What is ", "(", ")", "= ", "? ", "- ", "x - ", "2", "^2", " -> 3", "!", "a\n", " =\n", ".", " ("]
    for number in range(6000):
        text = f"{chance.choice(around)}{sum_at_the_end(chance)}{chance.choice(around)}"
        text = text_with_numbers(chance) + chance.choice(around) if number % 3 == 0 else text
        value = value_of_sum(text)
        assert value == built_in.value_of_prompt(text), text
        worked_out += value is not None
    assert worked_out > 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [("Compute\n3 + 4", 7), ("(2 + 1)(3 + 4)", None), ("2 ** 3 + 4", None), ("x + 3 + 4", None),
     ("-(3 + 4) × 2 =", -14), ("1,234 × 2 ÷ 4 = ?", 617), ("0.1 + 0.2", Fraction(3, 10)), ("3 / 0", None),
     ("- 12 + 7 =", 19), ("1)3+4", 7), ("(what is 12 − 7)", 5), ("1." + "3" * 5000 + " + 1", None),
     ("1+2 is " + "(" * 20_000, 3), ("9" * 20_000, None), ("3+4" + " " * 997, 7), ("3+4" + " " * 998, None)],
)  # fmt: skip
def test_sums_by_hand(text: str, value: int | None) -> None:
    assert value_of_sum(text) == built_in.value_of_prompt(text) == value


WORDS = ["dog", "Dog", "DOG", "d", "og", "ß", "SS", "İ", " ", "\n", "1", "12", "", "aa", "a"]
RULES = [
    RuleRewardConfig(rule=RuleName.count, text="dog", most=2),
    RuleRewardConfig(rule=RuleName.count, text="aa", most=3, ignore_case=True),
    RuleRewardConfig(rule=RuleName.count, text="ss", most=1, ignore_case=True),
    RuleRewardConfig(rule=RuleName.length, target=7),
    RuleRewardConfig(rule=RuleName.length, target=1),
    RuleRewardConfig(rule=RuleName.regex, pattern="[a-z]+|(1)?"),
    RuleRewardConfig(rule=RuleName.regex, pattern="^d.*?g$|a*", ignore_case=True),
    RuleRewardConfig(rule=RuleName.exact),
    RuleRewardConfig(rule=RuleName.exact, ignore_case=True),
    RuleRewardConfig(rule=RuleName.arithmetic),
]


@pytest.mark.parametrize("cfg", RULES, ids=lambda cfg: f"{cfg.rule.value} {cfg.text or cfg.pattern or cfg.target}")
def test_rules_are_the_products(cfg: RuleRewardConfig) -> None:
    chance, rule, scores = random.Random(5), rule_of(cfg, "reward"), set()
    for _ in range(400):
        text, right = ("".join(chance.choice(WORDS) for _ in range(chance.randrange(5))) for _ in range(2))
        right = chance.choice([right, text.upper(), f" {text}\n"])
        right = f"{right} {chance.choice([1, 12])}" if cfg.rule is RuleName.arithmetic else right
        drawn = sample(text, "3 + 9", chance.choice([right, None]) if cfg.rule is RuleName.arithmetic else right)
        (score,) = judged(cfg, [drawn], {}).terms["rule"]
        assert score == pytest.approx(rule(text, drawn.example), rel=0, abs=2e-16), (text, right)
        scores.add(score)
    assert len(scores) > 1


@pytest.mark.parametrize(("rule", "right"), [("exact", None), ("arithmetic", None), ("arithmetic", "many")])
def test_a_row_without_what_a_rule_needs_is_named(rule: str, right: str | None) -> None:
    prompt = TokenPrompt(ids("ask"), "rows.jsonl:1", "ask", right)
    with pytest.raises(RewardError, match=rf"^rows.jsonl:1: reward.rule={rule} "):
        rule_score(RuleRewardConfig(rule=RuleName[rule]), "reward", "3", prompt)


# ---- functions ----


def test_a_steady_function_is_asked_again() -> None:
    drawn = [sample("a", answer="a", number=0), sample("b", answer="a", number=1), sample("", number=2)]
    for name in ("by_row", "by_length", "noisy"):
        answer = judged(function(name), drawn)
        assert answer.terms["python"].tolist() == by_product(function(name), drawn)["python"].tolist()
        assert (answer.given, answer.notes, answer.weights) == ({}, {}, {"python": 1.0})


def test_a_steady_function_that_the_run_has_misheard_has_no_note() -> None:
    answer = judged(function("by_length"), samples("a", "bb"), {"python": np.array([1.75, 2.5])})
    assert (answer.terms["python"].tolist(), answer.given, answer.notes) == ([1.75, 2.75], {}, {})


@pytest.mark.parametrize(
    ("name", "texts", "timeout", "said"),
    [
        ("process", "a b c", 20, "answers otherwise when it is asked again (3 of 3 answers)"),
        ("raises", "a bad", 20, "raises ValueError: cannot read 'bad'"),
        ("hangs", "a slow", 0.3, "has not returned within 0.3 s"),
        ("exits", "a bad", 20, "ends its process (3)"),
        ("is_killed", "a bad", 20, "ends its process (-9)"),
        ("leaves", "a", 20, "raises SystemExit: enough"),
        ("not_a_number", "a bad", 20, "returns no finite number for rows.jsonl:2"),
        ("too_few", "a b", 20, "returns 1 scores for 2 answers"),
        ("nowhere", "a b", 20, "raises AttributeError: module 'tests.helpers.reward_functions' has no attribute "
                               "'nowhere'"),
    ],
)  # fmt: skip
def test_what_a_function_does_not_say_twice_is_given(name: str, texts: str, timeout: float, said: str) -> None:
    drawn = samples(*texts.split())
    answer = judged(function(name, timeout), drawn, {"python": np.zeros(len(drawn))})
    assert answer.given == {"python": f"tests.helpers.reward_functions:{name} {said}"}
    assert (answer.terms, answer.notes) == ({}, {})


def test_a_function_that_holds_the_interpreter_is_ended(tmp_path: Path) -> None:
    drawn = samples(str(tmp_path / "pid"))
    answer = judged(function("hangs_and_holds_the_interpreter", 0.3), drawn, {"python": np.zeros(1)})
    assert answer.given["python"].endswith("has not returned within 0.3 s")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text(encoding='utf-8')}").exists()


def test_a_function_that_judges_by_the_company_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the current folder. The run asked about two answers at a time."""
    code = """def rank(prompts, answers, rows):
    if len(answers) == 1 and answers[0] == "odd":
        raise ValueError("alone")
    return [sorted(answers).index(answer) for answer in answers]
"""
    (tmp_path / "judges_of_company.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    cfg = PythonRewardConfig(function="judges_of_company:rank", timeout_seconds=20)
    answer = judged(cfg, samples("d", "c", "b", "a"), {"python": np.array([1, 0, 1, 0])})
    assert answer.terms["python"].tolist() == [3, 2, 1, 0]
    assert answer.notes == {
        "python": "asked about each answer alone, judges_of_company:rank says otherwise: what it says depends on what "
        "it is asked together with"
    }
    answer = judged(cfg, samples("a", "odd"), {"python": np.array([0, 0])})
    assert answer.notes == {
        "python": "asked about each answer alone, judges_of_company:rank raises ValueError: alone"
    }  # fmt: skip


# ---- reward models ----

TEXTS = [("What now?", "Nothing at all."), ("a", ""), ("Tell me of the harbour, please.", "No"), ("b" * 37, "c" * 10)]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": len(TOKENIZER), "num_labels": 1}  # fmt: skip


def saved(path: Path, template: str | None = None) -> Path:
    """Save a small reward model, its weights in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, pad_token_id=TOKENIZER.pad_token_id)
    LlamaForSequenceClassification(config).bfloat16().save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def products_scores(cfg: ModelRewardConfig, tokenizer: Any, drawn: Sequence[Sample]) -> list[float]:
    model, layout = RewardModel(cfg, "reward", tokenizer, 512, torch.device("cpu")), get_layout("zigzag")
    pack = pack_sequences([model.encode(each) for each in drawn], layout.multiple(1))
    scores: list[float] = model(shard_pack(pack, ALONE, layout, CpuFlash(), 512), pack.end_S).tolist()
    return scores


def test_a_reward_model_in_the_policys_tokens(tmp_path: Path) -> None:
    cfg = ModelRewardConfig(path=str(saved(tmp_path)), precision=Precision.fp64)
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    scores = judged(cfg, drawn, {}).terms["model"]
    assert scores == pytest.approx(products_scores(cfg, TOKENIZER, drawn), rel=0, abs=1e-12)
    assert scores.tolist() == judged(cfg, drawn, {}, TOKENIZER).terms["model"].tolist()
    options = {"dtype": torch.float64, "attn_implementation": "sdpa"}
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options)
    with torch.no_grad(), precise(torch.float64):
        for score, (prompt, answer) in zip(scores, TEXTS, strict=True):
            text = torch.from_numpy(ids(prompt + answer)).long().unsqueeze(0)
            assert float(plain(input_ids=text).logits) == pytest.approx(score, rel=0, abs=1e-12)
    assert scores.std() > 1e-3


TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_reward_model_with_tokens_of_its_own(tmp_path: Path, template: str | None) -> None:
    """The policy has one more token. Two prompts are too long for the reward model, and lose their start."""
    foreign = byte_tokenizer()
    foreign.add_tokens(["<more>"])
    cfg = ModelRewardConfig(path=str(saved(tmp_path, template)), precision=Precision.fp64, max_length=40)
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    scores = judged(cfg, drawn, {}, foreign).terms["model"]
    assert scores == pytest.approx(products_scores(cfg, foreign, drawn), rel=0, abs=1e-12)
    assert abs(scores - judged(cfg, drawn, {}).terms["model"]).max() > 1e-3
    with pytest.raises(RewardError, match=r"^rows.jsonl:1: an answer of 4\d tokens .* reward.max_length=40"):
        judged(cfg, [sample("y" * 40)], {}, foreign)


# ---- all terms ----


def test_a_sum_is_judged_term_by_term(tmp_path: Path) -> None:
    cfg = SumRewardConfig(terms={
        "size": {"kind": "python", "weight": -0.3, "function": "tests.helpers.reward_functions:by_length"},
        "dogs": {"kind": "rule", "weight": 2.1, "rule": "count", "text": "dog", "most": 3},
        "judge": {"kind": "model", "weight": 0.7, "path": "nowhere", "precision": "fp32"},
    })  # fmt: skip
    drawn = samples("dog", "dog dog", "a cat")
    with built(cfg) as rewards:
        rewards.submit(drawn)
        made = rewards.judged(drawn, {"judge": [3.1, -1.7, 0.1]})
    scores = [each.score for each in made]
    ran = {name: np.array([each.terms[name] for each in made]) for name in cfg.terms}
    answer = judged(cfg, drawn, ran)
    assert {name: scores.tolist() for name, scores in answer.terms.items()} == {
        name: ran[name].tolist() for name in ("size", "dogs")
    }
    assert answer.given == {"judge": "the run computes in less than float64"}
    assert answer.weights == {"size": -0.3, "dogs": 2.1, "judge": 0.7}
    terms, stopped = answer.terms | {"judge": ran["judge"]}, [True, False, True]
    assert scored(terms, answer.weights, stopped, RolloutConfig()).tolist() == scores
    assert scored(terms, answer.weights, stopped, RolloutConfig(overlong=Overlong.mask)).tolist() == scores
    less = scored(terms, answer.weights, stopped, RolloutConfig(overlong=Overlong.penalty, overlong_penalty=0.25))
    assert less.tolist() == [scores[0], scores[1] - 0.25, scores[2]]


def test_a_reward_model_of_another_precision_is_given(tmp_path: Path) -> None:
    fp64, bf16 = (ModelRewardConfig(path="nowhere", precision=each) for each in (Precision.fp64, Precision.bf16))
    assert judged(fp64, samples("a"), {}, exact=False).given == {"model": "the run computes in less than float64"}
    assert judged(bf16, samples("a"), {}).given == {"model": "the run computes in less than float64"}

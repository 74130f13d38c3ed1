"""Drawing answers: the random numbers, the choice of tokens, the deal to ranks, and decoding against one full pass."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MinPLogitsWarper,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlexp.base.errors import DrawError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.model import hook
from rlexp.training.model.decoding import Decoding, KeyValues
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.model.policy import Policy
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout import sampling
from rlexp.training.rollout.choose import choose, kept, stream, uniform
from rlexp.training.rollout.deal import Request, deal, micro_batches
from rlexp.training.rollout.experience import off_pack
from rlexp.training.rollout.sampling import Drawer
from rlexp.training.types import Example, Wanted
from rlexp.training.world.groups import ALONE
from tests.helpers.ranks import seeded
from tests.oracles import vocabulary as again

VOCABULARY = 23
# float64, sums in another order; largest difference measured: 2.7e-15, for logits of up to 8.
EXACT = 1e-13


def prompt_of(index: int, length: int) -> Example:
    tokens = np.random.default_rng(index).integers(VOCABULARY, size=length).astype(np.int32)
    return Example(index, tokens, origin=f"prompt {index}")


def rows_of(lengths, n_samples: int = 1) -> list[Request]:
    pairs = itertools.product(enumerate(lengths), range(n_samples))
    return [Request(at * n_samples + n, prompt_of(at, length), n) for (at, length), n in pairs]


def model_of(attention: str, window: int | None) -> PreTrainedModel:
    """Build a model with grouped heads, and with weights so large that its distributions are far from uniform."""
    torch.manual_seed(0)
    kinds = (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window, "head_dim": 8}
        if window
        else {}
    )
    kind, of = (MinistralConfig, MinistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
    config = kind(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention, **kinds)  # fmt: skip
    model = of(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@pytest.fixture(scope="module", params=[None, 5], ids=["whole", "windows in some layers"])
def window(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture(scope="module")
def policy(window: int | None) -> Policy:
    return Policy(model_of(hook.NAME, window))


@pytest.fixture(scope="module")
def plain(window: int | None) -> PreTrainedModel:
    """The same weights with the attention of transformers."""
    return model_of("sdpa", window)


class Letters:
    """A tokenizer: token n is the n-th letter; the last one is special."""

    def decode(self, tokens, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + token) for token in tokens if token != VOCABULARY - 1)


def drawer_of(policy: Policy, ends=(), **options) -> Drawer:
    cfg = RolloutConfig(**{"max_new_tokens": 12, **options})
    forward = torch.no_grad()(policy)
    return Drawer(forward=forward, tokenizer=Letters(), ends=ends, cfg=cfg, seed=7, device=torch.device("cpu"),
                  dtype=np.dtype(np.float64), in_step=False)  # fmt: skip


def drawn(drawer: Drawer, parts) -> dict[int, tuple]:
    samples = [sample for part in drawer.draw(parts, 3) for sample in part]
    return {s.place: (s.answer.tolist(), s.stopped, s.text, s.behaviour) for s in samples}


# ---- noise ----


def test_numbers_are_uniform_and_independent_of_each_other() -> None:
    """Chi-square over 64 bins: of single numbers, and of pairs that differ in one part of the key, on an 8 × 8 grid."""
    base = np.arange(4096)
    zeros = np.zeros_like(base)
    here = uniform(stream(0, 0, base, zeros), 0)
    beside = {
        "seed": uniform(stream(1, 0, base, zeros), 0),
        "rollout": uniform(stream(0, 1, base, zeros), 0),
        "prompt": uniform(stream(0, 0, base + 1, zeros), 0),
        "sample": uniform(stream(0, 0, base, zeros + 1), 0),
        "position": uniform(stream(0, 0, base, zeros), 1),
        "prompt and sample swapped": uniform(stream(0, 0, zeros, base), 0),
    }
    assert ((here >= 0) & (here < 1)).all()
    for name, other in beside.items():
        board = np.bincount((np.floor(8 * here) * 8 + np.floor(8 * other)).astype(int), minlength=64)
        for counts in (board, np.bincount((64 * other).astype(int), minlength=64)):
            statistic = float(((counts - 64.0) ** 2 / 64).sum())
            assert 27 < statistic < 118, name  # 63 degrees of freedom: beyond either end once in 30,000


def test_a_number_is_known_by_its_key_alone() -> None:
    keys = stream(5, 6, [9, 1, 4], [0, 2, 1])
    for row, (prompt, number) in enumerate([(9, 0), (1, 2), (4, 1)]):
        assert uniform(stream(5, 6, [prompt], [number]), 11)[0] == uniform(keys, 11)[row]
    values = [uniform(stream(seed, rollout, [prompt], [number]), position)[0]
              for seed, rollout, prompt, number, position in itertools.product(range(4), repeat=5)]  # fmt: skip
    assert len(set(values)) == 4**5
    # A fixed value: a run that continues with a later version draws the same tokens.
    assert uniform(stream(0, 0, [0], [0]), 0)[0] == 0.29378526761814994


# ---- choosing ----


def test_a_token_is_where_the_sums_pass_the_number() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    numbers = {0.0: 0, 0.2499: 0, 0.25: 2, 0.7499: 2, 0.75: 3, 1 - 2**-53: 3}
    for number, expected in numbers.items():
        token, logp = choose(probs.log(), torch.tensor([number], dtype=torch.float64), RolloutConfig())
        assert token.item() == expected, number  # never a token of probability 0, at either end
        assert logp.item() == pytest.approx(math.log(probs[0, expected]), abs=1e-15)


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_tokens_are_as_often_drawn_as_torch_draws_them(options: dict) -> None:
    cfg, draws = RolloutConfig(**options), 20000
    logits = 2 * seeded(1, 40)
    allowed = kept(logits.log_softmax(-1), cfg)
    numbers = torch.from_numpy(uniform(stream(1, 2, range(draws), [0] * draws), 0))
    ours = torch.bincount(choose(logits.expand(draws, -1), numbers, cfg)[0], minlength=40)
    generator = torch.Generator().manual_seed(3)
    theirs = torch.bincount(torch.multinomial(allowed[0], draws, True, generator=generator), minlength=40)
    assert bool((ours[allowed[0] == 0] == 0).all())
    both = (ours + theirs).double()
    seen = both >= 10
    statistic = float(((ours - theirs)[seen] ** 2 / both[seen]).sum())
    degrees = int(seen.sum()) - 1
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)  # two samples of one distribution


@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.95])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
def test_tokens_are_left_out_as_transformers_leaves_them_out(top_k: int, top_p: float, min_p: float) -> None:
    logits = 3 * seeded(64, 50)
    expected = logits
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        expected = warper(None, expected)
    probs = kept(logits.log_softmax(-1), RolloutConfig(top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(probs > 0, expected > -torch.inf)
    assert torch.equal(probs[probs > 0], logits.log_softmax(-1).exp()[probs > 0])


# ---- dealing ----

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 8), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_every_sample_is_dealt_once_and_all_hands_are_alike_large(lengths, n_samples: int, ranks: int) -> None:
    prompts = [prompt_of(index, length) for index, length in enumerate(lengths)]
    hands = deal(prompts, n_samples, ranks)
    requests = [request for hand in hands for request in hand]
    assert sorted(request.place for request in requests) == list(range(len(lengths) * n_samples))
    for request in requests:
        assert request.place == request.example.index * n_samples + request.number
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1  # so they are equal where that is possible
    for hand in hands:
        assert [len(r.example.prompt) for r in hand] == sorted((len(r.example.prompt) for r in hand), reverse=True)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 200)), st.integers(1, 30))
@settings(deadline=None, max_examples=200)
def test_a_part_is_within_both_limits(lengths, n_samples: int, size: int, tokens: int | None, longest: int) -> None:
    hand = deal([prompt_of(index, length) for index, length in enumerate(lengths)], n_samples, 1)[0]
    parts = micro_batches(hand, size, tokens, longest)
    assert [request for part in parts for request in part] == hand
    for part in parts:
        assert 1 <= len(part) <= size
        width = max(len(request.example.prompt) for request in part) + longest
        assert tokens is None or len(part) == 1 or len(part) * width <= tokens  # a single row cannot be cut
    for part, after in itertools.pairwise(parts):  # no part is smaller than it must be
        width = max(len(request.example.prompt) for request in [*part, after[0]]) + longest
        assert len(part) == size or (tokens is not None and (len(part) + 1) * width > tokens)


# ---- decoding ----


@torch.no_grad()
def at_once(plain: PreTrainedModel, tokens) -> torch.Tensor:
    """Return the logits after a text, from one pass without a cache."""
    with precise(torch.float64):
        return plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("most", [None, 30])
@pytest.mark.parametrize("lengths", [(9, 4, 1), (6, 6, 6)], ids=str)
@torch.no_grad()
def test_a_row_reads_the_same_with_others_beside_it_in_pieces_and_after_they_left(
    policy: Policy, plain: PreTrainedModel, lengths, most: int | None
) -> None:
    """Left padding; prompts in pieces; two rows for each prompt; then rows leave in turn while the cache grows."""
    rows, longest = [prompt_of(at, n).prompt.tolist() for at, n in enumerate(lengths)], max(lengths)
    pads = torch.tensor([longest - n for n in lengths])
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    positions = (torch.arange(longest) - pads[:, None]).clamp(min=0)
    cache = KeyValues(pads, 3, most)
    for part in (slice(0, 4), slice(4, 5), slice(5, longest)):
        logits = policy(Decoding(tokens[:, part], positions[:, part], cache))
    twice = [0, 0, 1, 1, 2, 2]
    cache.take(torch.tensor(twice))
    texts, logits = [list(rows[at]) for at in twice], logits[twice]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        for text, logits_V in zip(texts, logits, strict=True):
            assert float((logits_V - at_once(plain, text)).abs().max()) < EXACT
        if step % 5 == 4:
            staying = [at for at in range(len(texts)) if at != step % len(texts)][::-1]
            cache.take(torch.tensor(staying))
            texts = [texts[at] for at in staying]
        new = torch.randint(VOCABULARY, (len(texts), 1), generator=generator)
        where = torch.tensor([[len(text)] for text in texts])
        texts = [[*text, int(token)] for text, token in zip(texts, new, strict=True)]
        logits = policy(Decoding(new, where, cache))
    assert cache.length == longest + 20


def test_a_cache_has_no_more_room_than_it_was_said_to_need(policy: Policy) -> None:
    drawer, held = drawer_of(policy, max_new_tokens=100), []
    inner = drawer._forward

    def forward(batch: Decoding) -> torch.Tensor:
        logits_BV = inner(batch)
        held.append(sum(each.nbytes for each in batch.cache.tensors()))
        return logits_BV

    drawer._forward = forward
    drawn(drawer, [rows_of([300], 4)])
    layers, groups, size = 2, 2, 8
    assert max(held) == 2 * layers * 4 * groups * (300 + 100 - 1) * size * 8


def test_what_is_drawn_depends_on_nothing_beside_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples stay the same for any cut into micro-batches and any pieces of the prompts."""
    requests = rows_of([17, 3, 9, 30], 3)
    whole = drawn(drawer_of(policy), [requests])
    assert len({tuple(answer) for answer, *_ in whole.values()}) > 6
    monkeypatch.setattr(sampling, "PREFILL", 8)
    for parts in ([[request] for request in requests], [requests[5:], requests[:5]], [requests[::2], requests[1::2]]):
        again = drawn(drawer_of(policy), parts)
        for place, (answer, stopped, text, behaviour) in whole.items():
            assert again[place][:3] == (answer, stopped, text)
            assert np.abs(again[place][3] - behaviour).max() < EXACT


def test_prompts_are_read_a_bounded_number_of_tokens_at_a_time(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PREFILL", 16)
    drawer, read = drawer_of(policy), []
    inner = drawer._forward
    drawer._forward = lambda batch: (read.append(batch.tokens_Bq.numel()), inner(batch))[1]  # type: ignore[func-returns-value]
    drawn(drawer, [rows_of([33, 20, 7], 2)])
    assert sum(read) == 3 * 33 + 11 * 6  # each prompt once for all its samples; the last token is not read
    assert max(read) <= 16


def test_log_probabilities_are_those_of_scoring(policy: Policy) -> None:
    """Also at a temperature and with tokens left out: log-probabilities are those of the whole distribution."""
    hot = Policy(policy.model, wanted=Wanted(temperature=0.7))
    requests = rows_of([12, 5, 8], 2)
    drawer = drawer_of(hot, temperature=0.7, top_k=4)
    samples = [sample for part in drawer.draw([requests], 0) for sample in part]
    layout, kernel = get_layout("zigzag"), get_kernel("auto", "cpu")
    pack = pack_sequences([(s.example.prompt, s.answer) for s in samples], layout.multiple(1))
    shard = shard_pack(pack, ALONE, layout, kernel, 64)
    with torch.no_grad():
        scored = off_pack(pack, shard, hot(shard).logps_n)
    for sample, old in zip(samples, scored, strict=True):
        assert np.abs(sample.behaviour - old).max() < EXACT
        assert old.max() < 0


# ---- ends ----


def test_answers_end_with_an_end_a_stop_or_their_longest(policy: Policy) -> None:
    """Each answer must be the beginning of the same answer drawn without any end."""
    requests = rows_of([9, 4, 14], 8)
    free = drawn(drawer_of(policy, max_new_tokens=20), [requests])
    assert all(len(answer) == 20 and not stopped for answer, stopped, *_ in free.values())
    texts = ["".join(chr(ord("a") + token) for token in answer) for answer, *_ in free.values()]
    stop = [texts[0][3:5], texts[1][6]]
    ends = [free[2][0][5], VOCABULARY - 1]
    cut = drawn(drawer_of(policy, ends, max_new_tokens=20, stop=stop), [requests])
    lengths = set()
    for place, (answer, *_) in free.items():
        text = [chr(ord("a") + token) for token in answer]
        first = next((n for n in range(1, 21) if answer[n - 1] in ends or any(s in "".join(text[:n]) for s in stop)), 0)
        shortened, stopped, said, behaviour = cut[place]
        assert shortened == answer[: first or 20]
        assert stopped == bool(first)
        assert len(behaviour) == len(shortened)
        assert not any(s in said for s in stop)
        assert "".join(text).startswith(said)
        lengths.add(len(shortened))
    assert len(lengths) > 3  # rows left at different times


def test_logits_that_are_not_finite_name_the_prompt(policy: Policy) -> None:
    drawer = drawer_of(policy)
    drawer._forward = lambda batch: torch.full((len(batch.tokens_Bq), VOCABULARY), math.nan)
    with pytest.raises(DrawError, match=r"prompt 0: .* after 0 tokens"):
        drawn(drawer, [rows_of([3])])


def test_answers_are_as_often_drawn_as_they_are_probable(policy: Policy, plain: PreTrainedModel) -> None:
    """4,000 answers of two tokens to one prompt, against the products of the tokens' probabilities."""
    draws = 4000
    prompt = prompt_of(3, 6)
    requests = [Request(number, prompt, number) for number in range(draws)]
    samples = drawn(drawer_of(policy, max_new_tokens=2), [requests])
    text = prompt.prompt.tolist()
    first = at_once(plain, text).softmax(-1)
    second = torch.stack([at_once(plain, [*text, token]).softmax(-1) for token in range(VOCABULARY)])
    expected = draws * (first[:, None] * second).flatten().numpy()
    pairs = [answer[0] * VOCABULARY + answer[1] for answer, *_ in samples.values()]
    counts = np.bincount(pairs, minlength=VOCABULARY**2)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    degrees = len(expected) - 1
    assert degrees > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


# ---- texts and ends, by the second reader ----


@pytest.mark.parametrize("kind", ["bytes", "stories260K"])
def test_texts_and_ends_are_the_second_reader_s(kind: str, shared: Path) -> None:
    """The tokens are random: bytes that are no UTF-8, special tokens anywhere, and texts that end an answer."""
    ours = byte_tokenizer() if kind == "bytes" else AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    other, chance, ends, cut = again.Bytes() if kind == "bytes" else ours, random.Random(1), 0, 0
    common = [ours(text, add_special_tokens=False).input_ids for text in ("ab", "é", "a", "漢", "b🙂", " \n", ".")]
    for _ in range(400):
        pieces = [[chance.randrange(len(ours))] if chance.random() < 0.4 else chance.choice(common)
                  for _ in range(chance.randrange(8))]  # fmt: skip
        answer = [token for piece in pieces for token in piece]
        stop = chance.sample(["a", "ab", "é", "漢", " \n", "b🙂", ".*"], chance.randrange(4))
        text = sampling.text_of(ours, answer, stop)
        assert again.text_of(other, answer, stop) == text
        cut += text != sampling.text_of(ours, answer, [])
        ends += same_ends(ours, other, answer, stop)
    assert min(ends, cut) > 60


def same_ends(ours: Any, other: Any, answer: Sequence[int], stop: list[str]) -> bool:
    """Draw an answer token by token, and compare after each; return whether it ever ended."""
    drawer = Drawer(forward=lambda _: torch.zeros(0), tokenizer=ours, ends=[1, 5], seed=0, in_step=False,
                    cfg=RolloutConfig(stop=stop), device=torch.device("cpu"), dtype=np.dtype(np.float64))  # fmt: skip
    noted, ever = sampling.Drawn([], [[]], [[]], [False]), False
    for place, token in enumerate(answer):
        drawer._note(noted, [0], [token], [0.0])
        assert again.ended(other, answer[: place + 1], [1, 5], stop) == noted.stopped[0]
        ever |= noted.stopped[0]
    return ever

"""`python -m rlexp.data`: what it counts, what it shows, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlexp.base.errors import DataError
from rlexp.config.checks.layout import described, gives_widths, heads_of
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.row_kinds import Kind
from rlexp.data import draw, page, rings
from rlexp.data.__main__ import main
from rlexp.data.answer import preview, sample_of, special_ids
from rlexp.data.facts import Piece, Preview, RowPart, plain
from rlexp.data.lengths import lengths_of
from rlexp.data.sharing import hashes
from rlexp.data.tables import visible
from rlexp.training.dataset.recipe import UNUSABLE
from rlexp.training.dataset.tokens import SAME, TRUNCATED
from rlexp.training.dealer.deal import unit_of
from rlexp.training.dealer.of_run import costs_of_rank, dealer_of
from rlexp.training.dealer.packing import pack_examples, shard_pack
from rlexp.training.model.loading import byte_tokenizer, load_tokenizer
from rlexp.training.ring import widths
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.layouts import get_layout
from rlexp.training.train.examples import read_examples, sampler_of
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, Ring, World
from tests.helpers.browser import chromium, opened
from tests.helpers.programs import python

# With a token for each byte, and one for the end of an answer.
ROWS = [
    {"prompt": "abcd", "chosen": "xy", "rejected": "z"},  # 4, 3, 2
    {"prompt": "abcd", "chosen": "xy", "rejected": "z"},  # the same
    {"prompt": "abcd", "chosen": "pqrs", "rejected": "z"},  # 4, 5, 2
    {"prompt": "ab", "chosen": "same", "rejected": "same"},  # left out
    {"prompt": "A" * 30, "chosen": "12345", "rejected": "1"},  # 14, 6, 2, after truncation to 20
    {"prompt": "ab", "chosen": "x"},  # unusable
    "no object",  # unusable
    {"prompt": "e", "chosen": "🙂", "rejected": "\u202e</script>"},  # 1, 5, 13
]
OPTIONS = ("data.max_length=20", "data.too_long=truncate", "data.bad_rows=drop", "data.shuffle=false",
           "train.batch_size=2", "train.micro_batch_size=1")  # fmt: skip
HOSTILE = ["</script><script>alert(1)</script>", "\x1b[31mred\x1b]0;title\x07\r\b", "a\u202eb\u2066c", "שלום עולם",
           "👩‍👩‍👧‍👦 🇩🇪", '"><img src=x onerror=alert(1)>', "tab\there\u0000\u0085"]  # fmt: skip


def written(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def looked(*overrides: str, samples: int = 3) -> Preview:
    return preview(compose_config(["launch.device=cpu", "logger=none", *overrides]), samples)


def of_file(path: Path, *overrides: str, samples: int = 3) -> Preview:
    return looked("data=jsonl", f"data.path={path}", f"data.cache={path.parent / 'cache'}", *overrides, samples=samples)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Preview:
    return of_file(written(tmp_path_factory.mktemp("known"), ROWS), *OPTIONS)


# ---- numbers, by hand ----


def test_sources_and_what_was_not_taken(known: Preview) -> None:
    (source,) = known.sources
    assert source.shape == "pairs: `prompt`, `chosen`, `rejected`"
    assert (source.read, source.kept, source.tokens, source.per_epoch) == (8, 5, 9 + 9 + 11 + 22 + 19, 5)
    found = {reason.what: (reason.count, reason.first and reason.first.rpartition(":")[2]) for reason in known.reasons}
    assert found == {TRUNCATED: (1, "5"), SAME: (1, "4"), UNUSABLE: (2, "6")}
    (listed,) = (reason for reason in known.reasons if reason.file)
    assert len(Path(str(listed.file)).read_text(encoding="utf-8").splitlines()) == 2
    assert [line.split(": ")[0].rpartition(":")[2] for line in listed.lines] == ["6", "7"]


def test_rows_lack_the_margins_that_a_loss_asks_for(tmp_path: Path) -> None:
    """Training refuses them in the same words. Other losses do not look at them."""
    margins: tuple[dict[str, Any], ...] = (
        {"margin": 1}, {"margin": "much better"}, {"score_chosen": 8, "score_rejected": 3.5}, {"margin": 0},
        {"score_chosen": "7.5", "score_rejected": 3})  # fmt: skip
    rows = [{"prompt": f"p{place}", "chosen": "x", "rejected": "y", **each} for place, each in enumerate(margins)]
    path, words = written(tmp_path, rows), ("train.batch_size=2", "data.eval_size=1")
    assert of_file(path, *words).problems == ()
    (said,) = of_file(path, *words, "loss.margin_weight=0.5").problems
    assert said == (
        f"{path}:2: has no margin, the first of 2 such rows in 5, and loss.margin_weight is above 0. Give every row "
        '`margin`, or both `score_chosen` and `score_rejected`, as numbers (1.5, and not "1.5"); or leave '
        "loss.margin_weight out."
    )
    cfg = compose_config(["launch.device=cpu", "data=jsonl", f"data.path={path}", f"data.cache={tmp_path / 'cache'}",
                          *words, "loss.margin_weight=0.5"])  # fmt: skip
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        RowsTask(cfg, read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE)))
    given_all = written(tmp_path, [{**each, "margin": 2} for each in rows], "all.jsonl")
    assert of_file(given_all, *words, "loss.margin_weight=0.5").problems == ()


def test_lengths(known: Preview) -> None:
    prompt, chosen, rejected, whole = known.lengths
    assert prompt.percentiles == {"min": 1, "5": 1, "25": 4, "50": 4, "75": 4, "95": 14, "99": 14, "max": 14}
    assert prompt.mean == pytest.approx(27 / 5)
    assert [chosen.percentiles["max"], rejected.percentiles["max"]] == [6, 13]
    assert (whole.count, whole.mean, whole.at_limit, whole.limit) == (10, 9.7, 1, 20)
    for each in known.lengths:
        assert sum(each.bars) == each.count
        assert len(each.edges) == len(each.bars) + 1
    assert dict(zip(prompt.edges, prompt.bars, strict=False)) == {1: 1, 4: 3, 14: 1} | {
        edge: 0 for edge in range(1, 15) if edge not in (1, 4, 14)
    }
    drawn = str(page._histogram(prompt))
    heights = [3 * float(each) / page.HIGH for each in re.findall(r'class="fill".*?height="([\d.]+)"', drawn)]
    assert heights == pytest.approx([*prompt.bars], rel=1e-3)  # the highest has three
    assert f'class="median" x1="{page.WIDE * 3.5 / 14:.2f}"' in drawn


def test_shared_prompts(known: Preview) -> None:
    found = known.sharing
    assert found is not None
    assert (found.examples, found.prompts, found.sharing, found.duplicates, found.copies) == (5, 3, 3, 1, 2)
    assert (found.tokens, found.prompt_tokens) == (97, 54)
    assert (found.saved_within, found.saved_across) == (27, 54 - (4 + 14 + 1))


def test_steps(known: Preview) -> None:
    found = known.steps
    assert found is not None
    assert (found.per_epoch, found.left_out, found.run, found.epochs) == (2, 1, 2, 1.0)
    assert (found.tokens_mean, found.tokens_most, found.tokens_per_epoch) == (38.5, 51, 77)


def test_rings(known: Preview) -> None:
    """Two steps of two pairs of 13, 13, 15 and 36 tokens, each a pack; padded to twice the longer 14, 14, 18 and 40."""
    rings = {ring.size: ring for ring in known.rings}
    assert {size: ring.packed for size, ring in rings.items()} == {1: 1, 2: 77 / 80, 4: 77 / 84, 8: 77 / 88}
    assert {size: ring.padded for size, ring in rings.items()} == {1: 77 / 86, 2: 77 / 86, 4: 77 / 92, 8: 77 / 96}
    assert rings[2].tokens == pytest.approx((7 + 7 + 8 + 18) / 38.5)
    assert [ring.size for ring in known.rings if ring.own] == [1]
    assert (rings[1].work, rings[1].grad_acc, rings[8].ranks) == (1.0, 2, 8)


def test_an_elastic_ring_stands_beside_fixed_ones() -> None:
    """It does what a fixed ring of all ranks does. One that is refused has no row, and neither has one rank."""
    words = ("parallel=elastic", "launch.nproc=4", "parallel.cut=auto")
    found = looked(*words).rings
    assert [ring.name for ring in found] == ["1", "2", "4", "8", "elastic"]
    assert [ring.name for ring in found if ring.own] == ["elastic"]
    four, elastic = found[2], found[-1]
    assert replace(four, own=True, elastic=True) == elastic
    asked = looked(*words, "parallel.ring_size=2").rings
    assert [ring.name for ring in asked if ring.own] == ["2"]
    assert [replace(ring, own=False) for ring in asked] == [replace(ring, own=False) for ring in found]
    assert [ring.name for ring in looked("launch.nproc=6", *words[2:]).rings] == ["1", "2", "4", "8", "elastic"]
    for refused in (("launch.nproc=4", "parallel.cut=all"), ("launch.nproc=1", "parallel.cut=auto"),
                    ("launch.nproc=2", "parallel=ring2", "parallel.layout=ulysses", "parallel.cut=auto")):  # fmt: skip
        assert not any(ring.elastic for ring in looked(*refused).rings)


def step_times(cfg: Config) -> float:
    """Return what the steps of a run on this ring take, by the dealer's estimate, as its ranks deal the packs."""
    pairs = read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE)).train
    ring, costs = cfg.parallel.ring_size, costs_of_rank(cfg, described(cfg.model) or {})
    dealer = dealer_of(cfg, heads_of(cfg.model), cfg.parallel.dp_size)
    spare, total = (ring - 1 if gives_widths(cfg) else 0), 0.0
    sampler = sampler_of(cfg, Kind.pairs, len(pairs))
    for batch in sampler.batches(1, sampler.steps_per_epoch):
        units = [pairs[index] for index in batch.indices]
        times = [0.0] * cfg.parallel.dp_size
        for replica, packs in enumerate(dealer.deal([*map(unit_of, units)]).packs):
            for places in packs:
                pack = pack_examples([units[place] for place in places], 1 if gives_widths(cfg) else ring, spare=spare,
                                     share=dealer.share)  # fmt: skip
                estimated = widths.deal if gives_widths(cfg) else widths.even
                times[replica] += estimated(pack.segments, ring, costs).slowest
        total += max(times)
    return total


@pytest.mark.parametrize("cut", ["auto", "all"])
def test_a_step_is_compared_with_that_of_the_best_ring(cut: str) -> None:
    """Each ring is as the run's own would be, with all that follows from its size. One of eight ranks has no time."""
    words = ("launch.nproc=2", f"parallel.cut={cut}", "data.size=60", "data.eval_size=0")
    found = {ring.name: ring for ring in looked(*words).rings}
    times = [step_times(compose_config(["launch.device=cpu", *words, f"parallel.ring_size={size}"])) for size in (1, 2)]
    steps = {name: ring.step for name, ring in found.items() if ring.step is not None}
    assert steps["2"] / steps["1"] == pytest.approx(times[1] / times[0])
    assert min(steps.values()) == 1
    assert "8" not in steps
    assert (found["1"].grad_acc, found["2"].grad_acc) == (1, 1)


def test_a_layout_without_an_estimate_has_no_step() -> None:
    found = looked("launch.nproc=2", "parallel=ring2", "parallel.layout=contiguous")
    assert [ring.step is None for ring in found.rings] == [False, True, True, True]


@pytest.mark.parametrize("window", [None, 8])
def test_attention_is_the_work_of_the_products_shards(window: int | None) -> None:
    words = ["parallel=ring2", "train.micro_batch_size=4", f"model.window={window or 'null'}"]
    found, kernel = looked(*words), get_kernel("plain", "cpu")
    cfg = compose_config(["launch.device=cpu", *words])
    pairs = read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE)).train
    most = mean = 0.0
    dealer = dealer_of(cfg, heads_of(cfg.model), 1)
    for batch in sampler_of(cfg, Kind.pairs, len(pairs)).batches(1, 30):
        units = [pairs[index] for index in batch.indices]
        for places in dealer.deal([*map(unit_of, units)]).packs[0]:
            pack = pack_examples([units[place] for place in places], 2, share=dealer.share)
            shard = shard_pack(pack, Ring(0, (0, 1)), get_layout("zigzag"), kernel, 512, (window,))
            most, mean = most + shard.most_work, mean + shard.mean_work
    (own,) = (ring for ring in found.rings if ring.own)
    assert own.work == pytest.approx(most / mean)
    assert (own.size, own.grad_acc) == (2, 2)
    apart = looked(*words, "data.share_prefix=false")
    for one, other in zip(found.rings, apart.rings, strict=True):  # nothing is shared there
        assert one.padded == pytest.approx(other.padded, rel=0.02)


def test_a_long_tail_does_not_squeeze_the_histogram() -> None:
    found = lengths_of("prompt", np.array([*range(10, 110), 100_000]))
    assert found.edges[-1] <= 120
    assert sum(found.bars) == 101
    assert found.bars[-1] >= 1


def test_hashes_tell_places_and_parts_apart() -> None:
    parts = [[1, 2], [3], [2, 1], [3], [1, 2], [3], [1], [2, 3], [], [0]]
    tokens = np.array([token for part in parts for token in part], np.int32)
    found = hashes([(tokens, np.cumsum([len(part) for part in parts]))], 2)
    prompts, rows = found[:, 0].tolist(), found[:, 1].tolist()
    assert prompts[0] == prompts[2]
    assert rows[0] == rows[2]
    assert len(set(prompts)) == len(set(rows)) == 4


def test_blocks_of_a_store_are_whole_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [{"prompt": f"p{n % 7}", "chosen": "a" * (n % 5 + 1), "rejected": "b"} for n in range(50)])
    whole = of_file(path).sharing
    monkeypatch.setattr("rlexp.data.sharing.BLOCK", 10)
    assert of_file(path).sharing == whole
    assert whole is not None
    assert (whole.prompts, whole.sharing, whole.duplicates) == (7, 50, 50 - 35)


# ---- kinds of rows ----


def test_unpaired_rows_are_shown_and_refused(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"q{n}", "completion": "a" * n, "label": n % 2 == 0} for n in range(1, 20)]
    found = of_file(written(tmp_path, rows))
    assert found.kind == "unpaired"
    assert [each.part for each in found.lengths] == ["prompt", "answer", "whole sequence"]
    assert found.samples[0].label is not None
    assert found.rings[0].packed == 1.0
    code, out, _ = command(capsys, monkeypatch, "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}")
    assert code == 1
    last = " ".join(out[out.rindex("loss=dpo") :].split())
    assert re.match(r"loss=dpo cannot train on the rows of data \(.*\): they are unpaired, and it needs pairs\.", last)


def test_supervised_turns_are_marked_one_by_one(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"},
            {"role": "user", "content": "u2"}, {"role": "assistant", "content": "a2"}]  # fmt: skip
    found = of_file(written(tmp_path, [{"messages": talk}] * 8), "train.batch_size=2")
    (answer,) = (part for part in found.samples[0].parts if part.name == "answer")
    text = draw.part_text(answer, 80, colours=False).plain
    assert text == "⟦a1⟧↵\n↵\nUser: u2↵\n↵\nAssistant: ⟦a2<eos>⟧"
    assert answer.trained == 2 + 2 + 1


def test_prompts_of_a_run_that_draws(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "abc", "chosen": "x", "rejected": "y"}] * 16)
    sizes = ("rollout.batch_size=4", "rollout.n_samples=2", "rollout.max_new_tokens=5", "train.batch_size=8",
             "train.micro_batch_size=2", "data.max_length=16")  # fmt: skip
    found = of_file(path, "loss=grpo", "reward.text=x", *sizes)
    assert (found.kind, found.problems) == ("prompts", ())
    assert found.steps is not None
    assert (found.steps.per_epoch, found.steps.tokens_mean) == (4, 4 * 2 * 3)
    assert found.sharing is not None
    assert (found.sharing.copies, found.sharing.saved_across) == (2, 16 * 3 * 2 - 3)
    assert {ring.size: ring.packed for ring in found.rings} == {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}  # packs of 2 × 8
    assert found.lengths[0].limit == 11
    assert "each answer with rollout.max_new_tokens=5" in found.sampled
    assert "Each prompt is in 2 samples" in draw.text(found)
    cfg, prompt = compose_config(["launch.device=cpu"]), Example(0, np.arange(3), origin="row 1", text="abc")
    answers = [rings._sequences(cfg, place, prompt)[0][1] for place in (0, 1)]
    assert answers[0][0] != answers[1][0]  # of two samples nothing is shared but the prompt


def test_a_mixture(tmp_path: Path) -> None:
    for name, count in (("one", 30), ("two", 90)):
        rows = [{"prompt": f"{name}{n}", "chosen": "x", "rejected": "y"} for n in range(count)]
        written(tmp_path, rows, f"{name}.jsonl")
    sources = [f"data.sources.{name}={{path: {tmp_path / f'{name}.jsonl'}, weight: {weight}}}"
               for name, weight in (("one", 1), ("two", 2))]  # fmt: skip
    found = looked("data=hf", *sources, f"data.cache={tmp_path / 'cache'}")
    assert [(each.weight, each.per_epoch) for each in found.sources] == [(1.0, 30), (2.0, 60)]
    assert "weight 2: 60 samples an epoch (66.7 % of all, each of its rows 0.67 times)" in draw.text(found)


def test_one_source_of_another_kind_is_named(tmp_path: Path) -> None:
    written(tmp_path, [{"prompt": "p", "chosen": "x", "rejected": "y"}] * 9, "one.jsonl")
    written(tmp_path, [{"prompt": "p", "completion": "x"}] * 9, "two.jsonl")
    sources = [f"data.sources.{name}.path={tmp_path / f'{name}.jsonl'}" for name in ("one", "two")]
    found = looked("data=hf", *sources, f"data.cache={tmp_path / 'cache'}")
    assert [each.kind for each in found.sources] == ["pairs", "supervised"]
    assert found.kind == "pairs"
    assert "data.sources.two (" in found.verdict
    assert "data.sources.one (" not in found.verdict


def test_held_out_rows_are_no_part_of_what_is_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": "x" * (1 + n), "rejected": "y"} for n in range(20)]
    found = of_file(written(tmp_path, rows), "data.eval_size=4")
    assert found.lengths[0].count == 16
    assert (found.sources[0].kept, found.sources[0].taken, found.sources[0].per_epoch) == (20, 16, 16)
    assert "16 of them to train on, and 4 held out by data.eval_size" in draw.text(found)
    assert "samples an epoch" not in draw.text(found)  # of one source that is all
    assert found.sharing is not None
    assert found.sharing.examples == 16


def test_too_few_rows_are_shown_and_refused(tmp_path: Path) -> None:
    found = of_file(written(tmp_path, [{"prompt": "p", "chosen": "x", "rejected": "y"}] * 3))
    assert found.verdict.startswith("train.batch_size=8: the data set has 3 pairs, less than one batch.")
    assert len(found.samples) == 3
    assert found.verdict in " ".join(draw.text(found).split())
    gone = of_file(written(tmp_path, [{"prompt": "p", "chosen": "x", "rejected": "x"}] * 3))
    assert gone.verdict == "No pair is left to train on."
    assert page.render(gone)


def test_it_leaves_the_tokens_that_training_reads(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS[:3])
    of_file(path, "train.batch_size=2")
    assert len(list((tmp_path / "cache" / "tokens").glob("*/meta.json"))) == 1

    cfg = compose_config(["launch.device=cpu", "data=jsonl", f"data.path={path}", f"data.cache={tmp_path / 'cache'}"])
    read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE))
    assert len(list((tmp_path / "cache" / "tokens").glob("*/meta.json"))) == 1


@pytest.mark.parametrize("data", ["data=synthetic", "data=long", "data=arithmetic"])
def test_generated_rows(data: str) -> None:
    loss = ("loss=ppo", "reward.rule=arithmetic") if data == "data=arithmetic" else ()
    found = looked(data, *loss, "data.size=16", "data.eval_size=0", "data.max_length=256")
    assert found.problems == ()
    assert found.sources[0].read == 16
    if data == "data=long":
        assert [(reason.what, reason.count) for reason in found.reasons] == [(TRUNCATED, 16)]
        assert found.lengths[-1].percentiles["max"] == 256


@pytest.mark.parametrize("experiment", ["bug_report", "ppo_tiny", "dog"])
def test_experiments(experiment: str, request: pytest.FixtureRequest) -> None:
    model: tuple[str, ...] = ()
    if experiment == "dog":
        model = (f"model.path={request.getfixturevalue('shared') / 'models' / 'stories260K'}",)
    found = looked(f"+experiment={experiment}", *model)
    assert found.problems == ()
    assert found.steps is not None
    assert found.steps.run == {"bug_report": 10, "ppo_tiny": 96, "dog": 240}[experiment]


def test_real_pairs(shared: Path, tmp_path: Path) -> None:
    rows = shared / "data" / "hh_helpful_base" / "test.jsonl"
    first = tmp_path / "first.jsonl"
    first.write_text("".join(rows.read_text(encoding="utf-8").splitlines(keepends=True)[:200]), encoding="utf-8")
    model = ("model=hf", f"model.path={shared / 'models' / 'smollm2-tokenizer'}")
    found = of_file(first, *model, "data.max_length=1024", "data.too_long=truncate")
    assert found.sources[0].kept == 200
    for sample in found.samples:
        prompt, chosen, _ = ("".join(piece.text for piece in part.pieces) for part in sample.parts)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert chosen.endswith("<|im_end|>\n")
        assert all(piece.special for part in sample.parts for piece in part.pieces if piece.text == "<|im_end|>")
        assert [part.trained == part.tokens for part in sample.parts] == [False, True, True]
    own = found.rings[0]
    assert own.packed == 1.0
    assert found.sharing is not None
    assert found.sharing.saved_within * 2 == found.sharing.prompt_tokens


# ---- samples, token by token ----


@given(st.text(max_size=40), st.text(max_size=40))
def test_the_pieces_of_a_sample_are_its_text(prompt: str, answer: str) -> None:
    tokenizer = byte_tokenizer()
    ids = [np.array(tokenizer(text)["input_ids"], np.int32) for text in (f"p{prompt}", f"a{answer}")]
    sample = sample_of(Example(0, ids[0], (ids[1],), origin="here:1"), ("answer",), tokenizer, special_ids(tokenizer))
    for part, own in zip(sample.parts, ids, strict=True):
        assert "".join(piece.text for piece in part.pieces) == tokenizer.decode(own)
        assert [each for piece in part.pieces for each in piece.ids] == own.tolist()


def test_real_tokens_are_pieces(shared: Path) -> None:
    for name in ("smollm2-tokenizer", "stories260K"):
        tokenizer = load_tokenizer(HFModelConfig(path=str(shared / "models" / name)))
        text = "Once upon a time, 日本 🙂 café — the end."
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        sample = sample_of(Example(0, ids[:4], (ids[4:],)), ("answer",), tokenizer, special_ids(tokenizer))
        assert "".join(piece.text for part in sample.parts for piece in part.pieces) == tokenizer.decode(ids)


def test_long_parts_are_shortened_in_the_middle() -> None:
    tokenizer = byte_tokenizer()
    long = np.array(tokenizer("word\n" * 2000)["input_ids"], np.int32)
    sample = sample_of(Example(0, long, (long[:3], long[:4])), ("chosen", "rejected"), tokenizer, frozenset())
    prompt = sample.parts[0]
    assert prompt.tokens == 10_000
    assert sum(piece.hidden or len(piece.ids) for piece in prompt.pieces) == 10_000
    text = draw.part_text(prompt, 80, colours=False).plain
    assert len(text.splitlines()) < 50
    shown = draw.shortened(prompt.pieces, 80, 40)
    assert sum(piece.hidden or len(piece.ids) for piece in shown) == 10_000
    (gap,) = (piece.hidden for piece in shown if piece.hidden)
    assert f"… {gap:,} tokens …" in text
    assert gap > 9_700
    one_line = RowPart("answer", 5000, 5000, tuple(Piece("x", (7,), trained=True) for _ in range(5000)))
    text = draw.part_text(one_line, 60, colours=False).plain
    assert text.count("x") == 40 * 60
    assert text.startswith("⟦x")
    assert text.endswith("x⟧")


def test_control_characters_are_spelt_out() -> None:
    assert visible("a\x1b[1m\r\t\x7f\x85") == "a␛[1m␍⇥␡⟨U+0085⟩"
    assert visible("a\nb") == "a↵\nb"
    assert visible("\u202e👩\u200d👩שלום") == "⟨U+202E⟩👩\u200d👩שלום"


# ---- the command ----


def command(capsys: Any, monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rlexp.data", "launch.device=cpu", *args])
    code = main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"p{n}{text}", "chosen": text, "rejected": f"no {text}"} for n, text in enumerate(HOSTILE * 2)]
    path = written(tmp_path, rows)
    html, plain_ = tmp_path / "page.html", tmp_path / "facts.json"
    code, out, err = command(
        capsys, monkeypatch, "data=jsonl", f"data.path={path}", "--html", str(html), "--json", str(plain_),
        "--samples", "8", "launch.nproc=2", "parallel=elastic", "parallel.cut=auto",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "⟦" in out
    assert out.endswith(f"\nwrote {plain_} and {html}\n")
    facts = json.loads(plain_.read_text(encoding="utf-8"))
    assert facts["trains"] is True
    assert facts["sources"][0]["kept"] == 14
    assert [(ring["elastic"], ring["step"] is not None) for ring in facts["rings"]] == [
        (False, True), (False, True), (False, False), (False, False), (True, True),
    ]  # fmt: skip
    assert len(facts["samples"]) == 8
    text = html.read_text(encoding="utf-8")
    assert re.search(r"<t[dh][^>]*>elastic</t[dh]>", text)
    assert re.search(r"<th[^>]*>step</th>", text)
    assert "<script" not in text
    assert "<img" not in text
    assert "script-src 'none'" in text
    assert " style=" not in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rows=3",), r"unrecognized arguments: --rows=3. See python -m rlexp.data --help"),
        (("--samples=-1",), r"--samples=-1: must be 0 or more"),
        (("data=jsonl",), r"data.path: has no value"),
        (("data=jsonl", "data.path=none.jsonl"), r"data.path=none.jsonl: "),
        (("data.max_lenght=3",), r"data.max_lenght"),
        (("--html=none/page.html",), r"--html=none/page.html: cannot be written"),
    ],
)
def test_wrong_input_is_one_message(
    args: tuple[str, ...], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command(capsys, monkeypatch, *args)
    assert (code, out) == (1, "")
    assert re.match(f"rlexp: .*{said}", err)
    assert err.count("\n") == 1


def test_rows_that_stop_a_run_stop_it(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ROWS)
    code, _, err = command(capsys, monkeypatch, "data=jsonl", f"data.path={path}")
    assert code == 1
    assert re.search(r"rows.jsonl:6: .*rejected", err)
    assert re.search(r"rows.jsonl:7: ", err)
    path = written(tmp_path, [{"what": 1}])
    _, _, err = command(capsys, monkeypatch, "data=jsonl", f"data.path={path}")
    assert "the run needs pairs, with `chosen` and `rejected`, and the row has what" in err


def test_what_is_wrong_is_said_before_torch_is_imported() -> None:
    code = "import sys; from rlexp.data.__main__ import main; sys.exit(main() + 7 * ('torch' in sys.modules))"
    for argument in ("--rows=3", "data=jsonl"):
        ended = python("-c", code, argument)
        assert ended.returncode == 1, ended.stderr


# ---- terminal and page ----


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_the_terminal_is_as_wide_as_it_is(known: Preview, width: int) -> None:
    text = draw.text(known, width)
    assert max(map(len, text.splitlines())) <= width
    assert known.verdict in " ".join(text.split())
    assert "⟦" in text
    assert "▸" in text


def test_colours_take_the_place_of_signs(known: Preview) -> None:
    console = Console(width=80, force_terminal=True, color_system="standard", legacy_windows=False, highlight=False)
    with console.capture() as captured:
        console.print(draw.page(known, 80, colours=True))
    text = captured.get()
    assert "\x1b[1;32mxy\x1b[0m\x1b[1;35m<eos>\x1b[0m" in text
    assert "⟦" not in text


def test_facts_are_plain(known: Preview) -> None:
    told = json.loads(json.dumps(plain(known)))
    assert told["verdict"] == known.verdict
    assert told["lengths"][3]["at_limit"] == 1
    assert told["samples"][0]["parts"][1]["pieces"][0] == {
        "text": "x", "ids": [byte_tokenizer()("x")["input_ids"][0]], "trained": True, "special": False, "hidden": 0,
    }  # fmt: skip


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}{text}\n" * (n % 3 * 40 + 1), "chosen": text, "rejected": f"no {text}"}
            for n, text in enumerate(HOSTILE * 2)]  # fmt: skip
    found = of_file(written(tmp_path, rows), "data.max_length=16384", samples=7)
    file = tmp_path / "page.html"
    file.write_text(page.render(found), encoding="utf-8")
    with chromium() as browser:
        colours = set()
        for width in (1400, 390):
            for scheme in ("light", "dark"):
                with opened(browser, file, width=width, scheme=scheme) as it:  # type: ignore[arg-type]
                    assert it.page.evaluate("document.documentElement.scrollWidth") <= width
                    assert it.text("verdict") == f"Ready. {found.verdict}"
                    assert it.page.get_by_test_id("sample").count() == 7
                    assert it.page.locator("script, img").count() == 0
                    colours.add(it.page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
                    trained = it.page.locator(".text .t.on").first
                    assert trained.get_attribute("title").startswith("id")
        assert len(colours) == 2

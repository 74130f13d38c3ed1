"""The examples by which memory is predicted: the fullest micro-batch, and pairs that share a prompt."""

from __future__ import annotations

from rlexp.config.load import compose_config
from rlexp.training.dealer.deal import unit_of
from rlexp.training.dealer.of_run import dealer_of
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.train.examples import longest_examples, sharing_examples

BASE = ("launch.device=cpu", "data.max_length=100")


def test_the_longest_examples_fill_each_pack() -> None:
    """Three pairs of 200 tokens and one of 100 at once, on both of two replicas."""
    words = ("launch.nproc=2", "parallel=ring1", "train.batch_size=16", "train.max_tokens_per_micro_batch=700")
    cfg = compose_config([*BASE, *words])
    dealt = dealer_of(cfg, None, 2).deal([unit_of(each) for each in longest_examples(cfg).train])
    assert [size.tokens for of_replica in dealt.sizes for size in of_replica] == [700] * 4


def test_pairs_that_share_a_prompt() -> None:
    """The prompt's last token stands in each answer, which has 20 of its own, all of them trained on."""
    cfg = compose_config([*BASE, "train.batch_size=2", "train.micro_batch_size=1"])
    dealer = dealer_of(cfg, None, 1)
    pairs = sharing_examples(cfg, 20).train
    assert [size.tokens for size in dealer.deal([unit_of(each) for each in pairs]).sizes[0]] == [79 + 2 * 21] * 2
    pack = pack_examples(pairs[:1], 1, share=dealer.share)
    assert (pack.real_tokens, len(pack.place_N)) == (79 + 2 * 21, 40)

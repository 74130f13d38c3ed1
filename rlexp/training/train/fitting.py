"""What examples lack that a loss wants, and what a user should know of them."""

from __future__ import annotations

from rlexp.config.checks.loss import ALONE
from rlexp.config.schema import Config
from rlexp.config.schema.losses import KTOConfig, UnpairedConfig
from rlexp.training.algos.build import build_loss
from rlexp.training.train.examples import Examples, sampler_of

IDEAL = (1.0, 4 / 3)  # weight of all good answers over that of all bad ones, by the paper of KTO (section 4.2)
NEAR = 1.1  # a factor within which they are near enough


def unfit(cfg: Config, examples: Examples) -> str | None:
    """Say what the examples lack that the loss wants; None if nothing."""
    if cfg.loss.draws:
        return None
    wanted = build_loss(cfg.loss).wanted
    if wanted.margins:
        return _scored_unlike(examples) if wanted.scores else _without_margins(examples)
    if wanted.labels:
        return _alike(cfg, examples.labels) or (_alone(cfg, examples) if wanted.mismatched else None)
    return None


def remarks(cfg: Config, examples: Examples) -> list[str]:
    """Say what a user should know of the examples, for the header."""
    weight = getattr(cfg.loss, "margin_weight", 0.0)
    if isinstance(cfg.loss, KTOConfig):
        return unbalanced(cfg.loss, examples.labels)
    if cfg.loss.draws or examples.margins.lacking or not weight or not build_loss(cfg.loss).wanted.scores:
        return []
    return [
        f"margins: all rows have one (`margin`, or `score_chosen` less `score_rejected`), and loss.margin_weight="
        f"{weight:g} asks for it; loss.margin_weight=0 leaves them out"
    ]


def _without_margins(examples: Examples) -> str | None:
    if not examples.margins.lacking:
        return None
    return (
        f"{examples.margins.lack}, and loss.margin_weight is above 0. Give every row `margin`, or both `score_chosen` "
        f'and `score_rejected`, as numbers (1.5, and not "1.5"); or leave loss.margin_weight out.'
    )


def _scored_unlike(examples: Examples) -> str | None:
    """Refuse a mixture: its pairs would be trained towards different goals. Without any margin, all are 0."""
    margins = examples.margins
    if margins.lacking in (0, margins.rows):
        return None
    return (
        f"{margins.lack}, and the others have one. Give every row `margin`, or none; or leave them out: "
        f"loss.margin_weight=0."
    )


def _alike(cfg: Config, labels: tuple[int, int]) -> str | None:
    if all(labels) or not any(labels):
        return None
    only, other = ("true", "false") if labels[0] else ("false", "true")
    return (
        f"data={cfg.data.name}: all {sum(labels)} rows have `label` {only}, and loss={cfg.loss.name} compares good "
        f"answers with bad ones. Give some rows whose `label` is {other}; or, to learn answers as they are, loss=sft."
    )


def _alone(cfg: Config, examples: Examples) -> str | None:
    """Say if the last batch, or the held-out data, has one answer. Other batches are checked with the configuration."""
    size, taken = cfg.train.batch_size, sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture).taken
    why = f"loss={cfg.loss.name} {ALONE}"
    if taken % size == 1 and not cfg.data.drop_last:
        return (
            f"data.drop_last=false: {taken} answers in batches of {size} leave a last batch of 1, and {why}. Use "
            f"data.drop_last=true, or another train.batch_size."
        )
    if len(examples.held_out) == 1:
        return f"the held-out data: has 1 answer, and {why}. Hold out 2 or more."
    return None


def unbalanced(loss: UnpairedConfig, labels: tuple[int, int]) -> list[str]:
    """Say if the labels' weights are far from what the paper of KTO advises."""
    good, bad = labels
    if not good or not bad:
        return []
    ratio = loss.desirable_weight * good / (loss.undesirable_weight * bad)
    least, most = IDEAL
    if least / NEAR <= ratio <= most * NEAR:
        return []
    low, high = (bound * loss.undesirable_weight * bad / good for bound in IDEAL)
    return [
        f"warning: {good:,} good answers weigh {ratio:.2g} times as much as {bad:,} bad ones, and KTO's authors advise "
        f"1 to 1.33 times. Consider loss.desirable_weight={low:.3g} to {high:.3g}"
    ]

"""The layouts on which the same run is repeated: rings, replicas, micro-batch sizes, packing."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 8


@dataclass(frozen=True)
class Case:
    ring_size: int
    dp_size: int
    micro_batch_size: int | str
    packing: bool
    layout: str = "zigzag"
    ulysses_size: int | None = None
    tokens: int | None = None  # of a rank in a micro-batch, where samples are not counted
    widths: bool = False  # else all sequences are cut, short ones too

    @property
    def label(self) -> str:
        packed = "packed" if self.packing else "padded"
        size = self.micro_batch_size if self.tokens is None else f"{self.tokens} tokens"
        widths = ", with widths" if self.widths else ""
        return f"ring {self.ring_size} × {self.dp_size}, micro-batch {size}, {packed}, {self.layout}{widths}"

    def overrides(self) -> list[str]:
        return [
            f"parallel=ring{self.ring_size}",
            f"launch.nproc={self.ring_size * self.dp_size}",
            f"train.batch_size={BATCH}",
            f"train.micro_batch_size={self.micro_batch_size}",
            f"train.max_tokens_per_micro_batch={'null' if self.tokens is None else self.tokens}",
            f"data.packing={str(self.packing).lower()}",
            f"parallel.layout={self.layout}",
            f"parallel.cut={'auto' if self.widths else 'all'}",
            f"parallel.ulysses_size={'null' if self.ulysses_size is None else self.ulysses_size}",
        ]


GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 4))  # ring size, replicas


def cases() -> list[Case]:
    """Every grid with every micro-batch size that divides its batch, packed and padded; the baseline first."""
    return [
        Case(ring_size, dp_size, micro, packing)
        for packing in (True, False)
        for ring_size, dp_size in GRIDS
        for micro in (1, 2, 4, 8)
        if BATCH % (micro * dp_size) == 0
    ]


def layout_cases() -> list[Case]:
    """Every layout on rings of 2, 4 and 8, with micro-batches of uneven lengths; the plain run first."""
    layouts: list[tuple[str, int, int | None]] = [
        (name, ring, None) for name in ("zigzag", "contiguous", "allgather", "ulysses") for ring in (2, 4, 8)
    ]
    layouts += [("hybrid", ring, inner) for ring, inner in ((4, 2), (8, 2), (8, 4))]
    return [BASELINE, *(Case(ring, 1, 4, True, name, inner) for name, ring, inner in layouts)]


BASELINE = Case(1, 1, 1, True)


@dataclass(frozen=True)
class RolloutCase:
    """A layout of a run that draws its own samples, and its micro-batch sizes of drawing, scoring and training."""

    ring_size: int
    dp_size: int
    micro_batch_size: int  # of training
    drawn_at_once: int
    scored_at_once: int
    packing: bool = True
    tokens: int | None = None  # at most, drawn at once

    @property
    def label(self) -> str:
        packed = "packed" if self.packing else "padded"
        drawn = f"{self.drawn_at_once}" if self.tokens is None else f"{self.tokens} tokens"
        micro = f"micro-batch {self.micro_batch_size}, {drawn} generated and {self.scored_at_once} scored at once"
        return f"ring {self.ring_size} × {self.dp_size}, {micro}, {packed}"

    def overrides(self) -> list[str]:
        tokens = "null" if self.tokens is None else self.tokens
        return [
            *Case(self.ring_size, self.dp_size, self.micro_batch_size, self.packing).overrides(),
            f"rollout.micro_batch_size={self.drawn_at_once}",
            f"rollout.micro_batch_tokens={tokens}",
            f"rollout.score_batch_size={self.scored_at_once}",
        ]


# Two rollouts of 8 prompts × 2 samples; answers of 1 to 12 tokens, some of which stop by themselves. Adam's eps is that
# of the first implementations of PPO. Adam multiplies a gradient that is zero except for rounding (the divergence of a
# policy that has not moved, in an answer without advantage) by up to lr / eps, which with 1e-8 would be 2e5.
ROLLOUT = (
    *("loss=ppo", "data.size=32", "data.eval_size=6", "data.max_length=160", "rollout.batch_size=8"),
    *("rollout.n_samples=2", "rollout.epochs=2", "rollout.max_new_tokens=12", "rollout.stop=[a,b,c,d,e,f,g,h,i,j,k,l]"),
    *("reward.rule=regex", "reward.pattern='[0-9A-Za-z]'", "optim.lr=2e-3", "optim.eps=1e-5", "train.eval_every=5"),
)
FOUR = ("rollout.n_samples=4", "rollout.batch_size=4")
ADAPTIVE = ("loss.kl_target=0.05", "loss.kl_horizon=40")
# Every algorithm and every option of sampling and losses.
VARIANTS = {
    "ppo, shared critic": ("loss.critic=shared", "loss.value_clip=0.01"),
    "ppo, divergence in the loss, adaptive": ("loss.kl_in=loss", "loss.kl=k3", *ADAPTIVE),
    "ppo, divergence in the reward, adaptive": ("loss.kl=k2", "loss.gamma=0.99", *ADAPTIVE),
    "ppo, entropy, dual clip, narrow": ("loss.entropy=0.01", "loss.dual_clip=1.5", "loss.clip_low=0.01"),
    "ppo, overlong masked": ("rollout.overlong=mask",),
    "ppo, overlong penalised": ("rollout.overlong=penalty", "rollout.overlong_penalty=0.5"),
    "ppo, temperature and top-k": ("rollout.temperature=0.7", "rollout.top_k=40"),
    "ppo, top-p and min-p": ("rollout.top_p=0.9", "rollout.min_p=0.1", "rollout.importance_cap=2"),
    "ppo, activations recomputed": ("memory.checkpointing=true", "loss.normalize=sequence"),
    "ppo, heads shared out": ("parallel.layout=ulysses",),
    "grpo": ("loss=grpo", "loss.beta=0.1", *ADAPTIVE),
    "grpo, keys gathered": ("loss=grpo", "parallel.layout=allgather"),
    "grpo, filtered": ("loss=grpo", "loss.filter=true", "reward.rule=count", "reward.text=A"),
    "dr_grpo": ("loss=dr_grpo", *FOUR),
    "rloo": ("loss=rloo", "loss.beta=0.1", *FOUR),
    "reinforce_pp": ("loss=reinforce_pp", "loss.filter=true"),
    "gspo": ("loss=gspo", "loss.beta=0.1", "loss.entropy=0.01", "rollout.overlong=mask"),
    "ppo, generated sums": ("data=arithmetic", "data.size=32", "data.eval_size=6"),
}
ROLLOUT_BASELINE = RolloutCase(1, 1, 1, 16, 8)
ROLLOUT_PAIR = (ROLLOUT_BASELINE, RolloutCase(2, 2, 2, 3, 6))


def rollout_cases() -> list[RolloutCase]:
    """Rings and replicas of 1, 2 and 4, each with all portions; the baseline first."""
    grids = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    portions = ((1, 1, 1, True, None), (2, 3, 6, True, None), (2, 16, 16, False, 200))
    all_cases = [
        RolloutCase(ring, replicas, micro, drawn, scored, packing, tokens)
        for ring, replicas in grids
        for micro, drawn, scored, packing, tokens in portions
    ]
    return [ROLLOUT_BASELINE, *all_cases]

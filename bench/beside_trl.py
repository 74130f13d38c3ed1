"""Compare rlexp with TRL's DPOTrainer on one GPU: the same model, the same rows, one after the other.

python -m bench.beside_trl                                              on this machine's GPU; prints every section
python -m bench.beside_trl --only hh long                               these sections, of at most six minutes each
python -m bench.beside_trl --write docs/measured/beside_trl.md          and writes each as soon as it is complete
python -m bench.beside_trl --only long --profile                        where a step of rlexp's goes, by kind of kernel
python -m bench.beside_trl --rehearse                                   the same on the CPU, small, to see that it runs

With no GPU it says so and exits with 3. It needs trl, datasets and accelerate. What else is missing, or fails, says so
in its row, and the others go on. The exit code is 1 if the two do not compute the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.beside_trl_run import LOGPS, Lengths, Result, Variant, Work, missing, run_variant, summary
from bench.gpu_here import GIB, Machine, machine, stand_in
from bench.gpu_here import missing as no_gpu
from bench.gpu_training import Shape, what_failed, write_model
from bench.kernel_kinds import table as table_of_kinds
from bench.tables import commit, put

NO_GPU = 3  # the exit code
BUDGET = 340.0  # seconds of a section: a variant that would begin later is not tried
RECOMPUTED = "attention"  # memory.checkpointing where TRL checkpoints, whose only way keeps nothing of a layer
# Largest relative difference of the first step's mean log-probabilities of the answers (measured on an H200: 6e-5).
SAME = {"cuda": 2e-4, "cpu": 1e-5}
# And of its loss, ln 2 but for what four sums over 1,000 tokens lose in bfloat16 (measured: 6e-3, by Liger).
SAME_LOSS = {"cuda": 2e-2, "cpu": 1e-5}
# Tokens of a prompt and its two answers: every 48th pair of HH-RLHF's helpful-base test rows by length, shuffled,
# scaled from characters so that a sequence has 191 tokens on the mean.
HH: tuple[Lengths, ...] = (
    (11, 13, 24), (131, 59, 111), (244, 80, 11), (15, 8, 13), (71, 65, 52), (63, 62, 86), (16, 61, 68), (49, 29, 51),
    (11, 37, 48), (34, 94, 127), (363, 95, 55), (584, 98, 158), (302, 212, 126), (25, 34, 24), (29, 5, 412),
    (88, 28, 7), (22, 142, 33), (101, 11, 133), (49, 59, 44), (16, 91, 11), (460, 83, 17), (9, 48, 9), (60, 9, 41),
    (49, 14, 11), (213, 21, 149), (193, 56, 16), (264, 5, 97), (19, 112, 35), (241, 60, 21), (277, 41, 106),
    (262, 56, 83), (17, 18, 56), (157, 90, 65), (14, 122, 37), (14, 42, 47), (204, 242, 29), (22, 39, 77),
    (308, 11, 29), (189, 8, 7), (144, 91, 38), (20, 69, 92), (150, 41, 35), (252, 8, 22), (114, 155, 21),
    (111, 20, 29), (13, 25, 20), (140, 46, 48), (189, 7, 21),
)  # fmt: skip


@dataclass(frozen=True)
class Tied(Shape):
    """A shape whose head is its embedding."""

    def config(self, dtype: str) -> dict[str, Any]:
        return super().config(dtype) | {"tie_word_embeddings": True}


LLAMA = Tied("a Llama of 1.24 billion parameters", 2048, 8192, 32, 8, 128256, 16)
SMALL = Tied("a tiny Llama", 64, 176, 8, 2, 512, 2)
FA4, LIGER = ("flash_attn.cute",), ("liger_kernel",)
TRL = ("trl", "datasets", "accelerate")


def trl(name: str, *needs: str, **more: Any) -> Variant:
    return Variant("TRL", name, needs=(*TRL, *needs), **more)


VARIANTS = (
    Variant("rlexp", "as installed"),
    trl("sdpa"),
    Variant("rlexp", "flash-attn 4", ("parallel.kernel=flash_attn_4",), needs=FA4),
    trl("flash-attn 4", *FA4, attention="flash_attention_4"),
    trl("sdpa, Liger", *LIGER, liger=True),
    trl("flash-attn 4, Liger", *FA4, *LIGER, attention="flash_attention_4", liger=True),
    trl("sdpa, bfloat16", dtype="bfloat16"),
)
FOR_GPU = ("flash-attn 4", "Liger")  # variants that no CPU runs


@dataclass(frozen=True)
class Line:
    """One comparison: which pairs, and how many make a step."""

    title: str
    lengths: tuple[Lengths, ...]
    small: tuple[Lengths, ...]  # in a rehearsal
    pairs: int
    micro: int
    warm_up: int
    steps: int
    checkpointing: str = "false"

    def work(self, on: Machine, folder: str) -> Work:
        rehearsed = on.device == "cpu"
        lengths = self.small if rehearsed else self.lengths
        shape = SMALL if rehearsed else LLAMA
        return Work(folder, on.device, lengths, self.pairs, self.micro, 1 if rehearsed else self.warm_up,
                    2 if rehearsed else self.steps, shape.vocabulary, self.checkpointing)  # fmt: skip


def long(tokens: int, prompt: int) -> tuple[Lengths, ...]:
    return ((prompt, tokens - prompt, tokens - prompt),)


LINES = {
    "hh": Line("HH, 191 tokens", HH, tuple((a // 4 + 2, b // 4 + 2, c // 4 + 2) for a, b, c in HH[:16]), 16, 8, 3, 12),
    "long": Line("8,000 tokens", long(8000, 7000), long(160, 140), 4, 1, 2, 5),
    "long_checkpointed": Line("8,000 tokens, checkpointing", long(8000, 7000), long(160, 140), 4, 1, 2, 5, RECOMPUTED),
    "longest": Line("32,000 tokens, checkpointing", long(32000, 30000), long(320, 300), 2, 1, 1, 3, RECOMPUTED),
}


def main() -> int:
    options = _arguments()
    if not options.rehearse and (why := no_gpu()):
        sys.stderr.write(f"bench.beside_trl: {why}. Nothing was changed.\n")
        return NO_GPU
    on = stand_in() if options.rehearse else machine()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        write_model(Path(folder), *((SMALL, "float32") if options.rehearse else (LLAMA, "bfloat16")))
        for name in options.only or LINES:
            if options.profile:
                print("\n".join(profiled(LINES[name], on, folder)), end="\n\n", flush=True)
            else:
                wrong += section(name, on, folder, options)
    for each in wrong:
        print(f"WRONG: {each}", file=sys.stderr)
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.beside_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(LINES), nargs="+", help="these sections")
    parser.add_argument(
        "--without", nargs="+", default=[], help="leave out variants whose names have one of these in them"
    )
    parser.add_argument("--write", type=Path, help="put the sections into this page, between their markers")
    parser.add_argument("--commit", help="the commit to name, where git cannot tell")
    parser.add_argument("--profile", action="store_true", help="profile rlexp alone, and compare nothing")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    options = parser.parse_args()
    for word in options.without:
        if not any(word in each.key for each in VARIANTS) or word in "rlexp":
            names = "; ".join(each.key for each in VARIANTS)
            parser.error(f"--without {word}: must be in the name of a variant, and not be rlexp. Variants: {names}.")
    return options


def section(name: str, on: Machine, folder: str, options: argparse.Namespace) -> list[str]:
    """Measure a line, print it and write it. Return what is wrong in it."""
    line, began = LINES[name], time.monotonic()
    chosen = [each for each in VARIANTS if not any(word in each.key for word in options.without)]
    compared = compare(line, on, folder, chosen)
    text = "\n".join([*_about(on, compared.work), "", *compared.table(), "", *compared.words()])
    kind = "Rehearsed on a CPU, which says nothing of a GPU," if options.rehearse else "Measured"
    signed = (
        f"{text}\n\n{kind} {time.strftime('%Y-%m-%d')} at {commit(options.commit)}, by `python -m bench.beside_trl "
        f"--only {name}` in {time.monotonic() - began:.0f} s, on {on.about()}; {versions()}."
    )
    print(f"## {line.title}\n\n{signed}", end="\n\n", flush=True)
    if options.write:
        put(options.write, signed, name)
        if not options.rehearse and (row := compared.row()):
            put(options.write, with_row(options.write, row), "short")
    return compared.wrong()


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("transformers", "trl", "flash-attn-4", "liger-kernel"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


# ---- measuring ----


@dataclass(frozen=True)
class Compared:
    """The results of a line's variants: what was measured, or why it was not."""

    title: str
    work: Work
    results: dict[Variant, Result]

    @cached_property
    def done(self) -> dict[Variant, Result]:
        return {variant: result for variant, result in self.results.items() if "failed" not in result}

    def fastest(self, trainer: str, *, half_state: bool = False) -> Variant | None:
        """Return the variant with the shortest step, of those whose optimizer's state is in float32 or not."""
        able = [each for each in self.done if each.trainer == trainer and each.half_state == half_state]
        return min(able, key=self.seconds, default=None)

    def seconds(self, variant: Variant) -> float:
        return summary(self.done[variant], self.work)[0]

    def peak(self, variant: Variant) -> str:
        peak = self.done[variant]["peak"]
        return "–" if peak is None else f"{peak / GIB:.1f}"

    def table(self) -> Iterator[str]:
        yield "| trainer | variant | weights | s a step | range | GiB | tokens/s |"
        yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
        for variant, result in self.results.items():
            start = f"| {variant.trainer} | {variant.name} | {variant.weights(self.work.device)} "
            if "failed" in result:
                yield f"{start}| {result['failed']} | | | |"
                continue
            median, least, most, speed = summary(result, self.work)
            yield f"{start}| {median:.3g} | {least:.3g} to {most:.3g} | {self.peak(variant)} | {speed:,.0f} |"

    def words(self) -> Iterator[str]:
        ours, theirs = self.fastest("rlexp"), self.fastest("TRL")
        kernels = {result["attention"] for variant, result in self.done.items() if variant.trainer == "rlexp"}
        if kernels:
            yield f"rlexp's kernels: {', '.join(f'`{each}`' for each in sorted(kernels))}."
        if ours is None or theirs is None:
            yield "One of the two has no result, so nothing is compared."
            return
        yield (
            f"Fastest: rlexp ({ours.name}) {self.seconds(ours):.3g} s, TRL ({theirs.name}) {self.seconds(theirs):.3g} "
            f"s: TRL takes {self.seconds(theirs) / self.seconds(ours):.2f} times as long."
        )
        half = self.fastest("TRL", half_state=True)
        if half is not None:
            times = self.seconds(half) / self.seconds(ours)
            yield f"With its optimizer in bfloat16, which rounds small updates away, TRL takes {times:.2f} times."
        apart = self.apart().values()
        yield (
            f"In the first step, the mean log-probabilities of chosen and rejected answers differ from rlexp's by "
            f"{max(logps for logps, _ in apart):.1e} at most, and the loss by {max(loss for _, loss in apart):.1e} "
            f"(relative; more than {self.near[0]:.0e} and {self.near[1]:.0e} is an error)."
        )

    @property
    def near(self) -> tuple[float, float]:
        return SAME[self.work.device], SAME_LOSS[self.work.device]

    def apart(self) -> dict[Variant, tuple[float, float]]:
        """Return how far each first step is from that of rlexp's first variant, without those with bfloat16 states:
        its log-probabilities and its loss."""
        known = next(result["first"] for variant, result in self.done.items() if variant.trainer == "rlexp")

        def off(result: Result, *names: str) -> float:
            return max(abs(result["first"][name] - known[name]) / abs(known[name]) for name in names)

        return {variant: (off(result, *LOGPS), off(result, "loss"))
                for variant, result in self.done.items() if not variant.half_state}  # fmt: skip

    def wrong(self) -> list[str]:
        if not any(variant.trainer == "rlexp" for variant in self.done):
            return [f"{self.title}: rlexp has no result"]
        return [f"{self.title}: the {what} in the first step of {variant.key} is {apart:.1e} off rlexp's"
                for variant, found in self.apart().items()
                for what, apart, near in zip(("log-probability", "loss"), found, self.near, strict=True)
                if not apart <= near]  # fmt: skip

    def row(self) -> str | None:
        """Return the line's row of the short table: the fastest of each side. Its section has the peaks of memory."""
        ours, theirs = self.fastest("rlexp"), self.fastest("TRL")
        if ours is None or theirs is None:
            return None
        cells = [f"{self.seconds(each):.3g} | {each.name}" for each in (theirs, ours)]
        times = self.seconds(theirs) / self.seconds(ours)
        return f"| {self.title} | {' | '.join(cells)} | {times:.2f} | {time.strftime('%Y-%m-%d')} |"


def compare(line: Line, on: Machine, folder: str, variants: Sequence[Variant] = VARIANTS) -> Compared:
    """Run the variants one after the other, each in a process of its own, until the time is over."""
    work, began = line.work(on, folder), time.monotonic()
    results: dict[Variant, Result] = {}
    for variant in variants:
        if on.device == "cpu" and any(name in variant.name for name in FOR_GPU):
            continue
        if (left := BUDGET - (time.monotonic() - began)) <= 0:
            results[variant] = {"failed": "not tried: the section's time was over"}
            continue
        results[variant] = started(variant, work, left=left)
        print(f"{line.title}, {variant.key}: {results[variant]}", file=sys.stderr, flush=True)
    return Compared(line.title, work, results)


def started(variant: Variant, work: Work, *, profiled: bool = False, left: float = BUDGET) -> Result:
    """Run a variant in a process that ends and frees its memory, in the seconds that are left; say why it failed."""
    from rlexp.launch.local import Interrupted, run_ranks

    if (why := missing(variant)) is not None:
        return {"failed": why}
    try:
        given = (variant, work, profiled)
        (result,) = run_ranks(run_variant, 1, given, device=work.device, preload=("torch",), timeout=left)
    except Interrupted:  # by Ctrl-C: nothing goes on
        raise
    except Exception as failure:
        print(failure, file=sys.stderr, flush=True)
        return {"failed": f"failed: {what_failed(str(failure))}".replace("|", "/")[:120]}
    return dict(result)


def profiled(line: Line, on: Machine, folder: str) -> Iterator[str]:
    work = line.work(on, folder)
    result = started(VARIANTS[0], dataclasses.replace(work, steps=work.steps + 1), profiled=True)
    yield f"## {line.title}\n"
    if "failed" in result:
        yield result["failed"]
        return
    if on.device == "cpu":
        yield "On a CPU, which says nothing of a GPU."
    without = result["seconds"][:-1]  # the last step was profiled
    yield from table_of_kinds(result["kinds"], sorted(without)[len(without) // 2])


# ---- words ----


def _about(on: Machine, work: Work) -> Iterator[str]:
    model = SMALL if on.device == "cpu" else LLAMA
    kept = "activations checkpointed" if work.checkpointing != "false" else "without checkpointing"
    yield (
        f"DPO with a reference model, {model.name}, {work.pairs} pairs a step in micro-batches of {work.micro}, "
        f"{kept}: {work.tokens:,.0f} tokens a step, the longest sequence {work.longest:,}. Medians of {work.steps} "
        f"steps after {work.warm_up}."
    )


def with_row(page: Path, row: str) -> str:
    """Return the short table of a page with this row in the place of the one that has the same first cell."""
    text = page.read_text(encoding="utf-8")
    table = text.partition("<!-- short: begin -->\n")[2].partition("\n<!-- short: end -->")[0].splitlines()

    def first(line: str) -> str:
        return line.split("|")[1].strip() if line.count("|") > 1 else ""

    return "\n".join(row if first(each) == first(row) else each for each in table)


if __name__ == "__main__":
    sys.exit(main())

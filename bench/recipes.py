"""Predict what the recipes need: for each experiment of an 8B model, the memory of a GPU, the time of a step, and the
longest sequence that fits. Or run them to their end with a small model in its place.

python -m bench.recipes                                                      all of them, about ten minutes on two cores
python -m bench.recipes --only lora_8b --write docs/measured/recipes.md      one, beside the rows that are there
python -m bench.recipes --run --write docs/measured/recipes.md               train SmolLM2-135M by each, on this CPU

A recipe is a file in conf/experiment/ with a line `# Check:`, the command that predicts it. With --write, the answers
also go into the recipes' own lines `# Predicted:`, and from the page into docs/recipes.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kept_rows import table_under
from bench.tables import commit, put
from rlexp.base.byte_counts import GIB
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "conf" / "experiment"
MODEL = f"model.path={ROOT / 'tests' / 'files' / 'models' / 'qwen3_8b'}"  # its config.json, which needs no hub
USUAL = 600  # tokens of the other rows that are predicted
HEAD = (
    "| recipe | GPUs | engine | longest rows, tokens | GiB a GPU | of | where | s a step, about | "
    f"rows of {USUAL}: GiB a GPU | rows of {USUAL}: s a step, about | longest that fits, tokens | predicted |",
    "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
)
HEADING = "predicted"
PREDICTED = re.compile(r"^# Predicted: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """What the first lines of an experiment say."""

    name: str
    said: dict[str, str]  # by the word at the start of a line

    @property
    def words(self) -> list[str]:
        """The overrides of its line `# Check:`."""
        return shlex.split(self.said["Check"])[3:]


def recipes() -> list[Recipe]:
    read = [read_recipe(file) for file in sorted(FOLDER.glob("*.yaml"))]
    return [each for each in read if "Check" in each.said]


def read_recipe(file: Path) -> Recipe:
    """Read the comment at the start of an experiment. An indented line continues the one above."""
    said: dict[str, str] = {}
    word = ""
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        if found := re.match(r"# ([A-Z]\w+): +(.*)", line):
            word = found[1]
            said[word] = found[2]
        elif word and line.startswith("#  "):
            said[word] += f"\n{line.lstrip('# ')}"
    return Recipe(file.stem, said)


@dataclass(frozen=True)
class Predicted:
    """What a recipe needs on the hardware that it names."""

    cfg: Config  # with the engine that it takes
    peak: float  # GiB
    phase: str
    limit: float  # GiB
    seconds: float
    longest: int  # tokens; 0 if it was not looked for


def predicted(recipe: Recipe, processes: int, *more: str, longest: bool = False) -> Predicted:
    """Predict a recipe, with these overrides too; refuse one that does not fit."""
    from rlexp.preflight.children import at_once
    from rlexp.preflight.rehearsal.rehearse import preload
    from rlexp.preflight.vllm import room
    from rlexp.training.model.loading import load_config

    cfg = compose_elsewhere([*recipe.words, MODEL, *more])
    model = load_config(cfg.model, cfg.data.max_length)
    preload()  # rehearsals are forked from this process
    ((taken, prediction, tokens),) = at_once([_predicting(cfg, model, longest=longest)], processes)
    peak, limit = prediction.peak.bytes / GIB, room(taken) / GIB
    if not prediction.fits(room(taken)):
        raise SystemExit(f"{recipe.name}: does not fit: it needs {peak:.1f} GiB of {limit:.1f}.")
    return Predicted(taken, peak, prediction.peak.phase, limit, prediction.seconds, tokens)


def row(recipe: Recipe, at: str, processes: int) -> str:
    """Return a recipe's line of the table. `at` names the commit."""
    found = predicted(recipe, processes, longest=True)
    cfg = found.cfg
    usual = predicted(recipe, processes, *usual_rows(cfg))
    cells = (
        f"`{recipe.name}`", f"{cfg.parallel.world_size} × {cfg.hardware.name}", f"`{cfg.engine.name.value}`",
        f"{cfg.data.max_length:,}", f"{found.peak:.1f}", f"{found.limit:.1f}", found.phase, f"{found.seconds:.3g}",
        f"{usual.peak:.1f}", f"{usual.seconds:.3g}", f"{found.longest:,}", f"{time.strftime('%Y-%m-%d')}, {at}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def usual_rows(cfg: Config) -> list[str]:
    """Return the overrides by which every sequence has `USUAL` tokens, on the same engine."""
    answer = ["rollout.max_new_tokens=500"] if cfg.loss.draws else []
    return [f"data.max_length={USUAL}", f"engine={cfg.engine.name.value}", *answer]


def _predicting(cfg: Config, model: Any, *, longest: bool) -> Any:
    """Predict a configuration as preflight does, with the engine that it takes. A task of `children.at_once`."""
    from rlexp.preflight.longest_that_fits import fit_from
    from rlexp.preflight.predict import predict
    from rlexp.preflight.remedy import first_that_fits, laid_out

    (taken,) = yield [first_that_fits(cfg, model)]
    laid = yield from laid_out(taken.cfg, model)
    asked = taken.outcome or (yield from predict(laid, model))
    tokens = (yield from fit_from(laid, model, asked)).tokens if longest else 0
    return laid, asked.prediction.with_share(), tokens


def named(line: str) -> str:
    return line.split("`")[1]


def tell(file: Path, line: str) -> None:
    """Write a recipe's prediction into its own first lines."""
    cells = [each.strip() for each in line.strip("|").split("|")]
    said = (
        f"# Predicted: {cells[4]} GiB of {cells[5]} a GPU, about {cells[7]} s a step "
        f"(rows of {USUAL} tokens: {cells[9]} s); not run on GPUs yet"
    )
    file.write_text(PREDICTED.sub(said, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these recipes")
    parser.add_argument("--write", type=Path, help="put the rows into this page")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="rehearsals at once")
    parser.add_argument("--run", action="store_true", help="train a small model to the end by each recipe, on the CPU")
    parser.add_argument("--again", action="store_true", help="of --run: also those that the page has")
    options = parser.parse_args()
    if options.run:
        from bench.recipes_run import run

        sys.exit(run(options))
    from rlexp.preflight import quietly

    quietly()
    there, at = recipes(), commit()  # before the first lines of a recipe change
    known = {named(line): line for line in table_under(options.write, HEADING)[2:]} if options.write else {}
    for recipe in there:
        if not options.only or recipe.name in options.only:
            known[recipe.name] = row(recipe, at, options.processes)
            print(known[recipe.name], flush=True)
            if options.write:
                tell(FOLDER / f"{recipe.name}.yaml", known[recipe.name])
                lines = [known[each.name] for each in there if each.name in known]
                put(options.write, "\n".join([*HEAD, *lines]), "predicted")


if __name__ == "__main__":
    main()

"""The recipes for GPUs: each composes and fits where it says, says what the pages say, and trains a small model here.

A recipe is an experiment with a line `# Check:`. On a CPU, `SMALL` says what takes the place of its model, its rows and
its sizes: what is tested is that its words go together, from the rows to the model that it writes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest
from transformers import Qwen3Config

from bench import recipes as bench
from bench.kept_rows import filled, table_under
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config
from rlexp.config.schema.data import JsonlDataConfig
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.models import saved
from tests.helpers.paths import ROOT
from tests.helpers.rehearsals import alone
from tests.helpers.runs import on_two_nodes, rows_of, run_json

RECIPES = {each.name: each for each in bench.recipes()}
PAGE = ROOT / "docs" / "recipes.md"
MEASURED = ROOT / "docs" / "measured" / "recipes.md"
CPU = ("launch.device=cpu", "model=tiny", "logger=none", "hydra.run.dir=run", "train.max_steps=2",
       "train.eval_every=2", "train.batch_size=8", "data.path=rows.jsonl", "data.eval_split=null", "data.eval_size=4",
       "data.max_length=256")  # fmt: skip
# What takes the place of a recipe's own, and the loss of its first step where it is known. vLLM is not here:
# tests/training/rollout/ has its own tests.
SMALL: dict[str, tuple[tuple[str, ...], float | None]] = {
    "sft_8b": ((), None),
    "dpo_8b": ((), math.log(2)),
    "lora_8b": ((), math.log(2)),
    "lora_8b_1gpu": ((), math.log(2)),
    "dpo_8b_128k": (("model=qwen3_8b", "model.path=qwen3", "data.max_length=8192"), math.log(2)),
    "reward_8b": ((), None),
    "grpo_8b": (("model=qwen3_8b", "model.path=qwen3", "data.subset=null", "rollout.engine=native",
                 "rollout.batch_size=4", "rollout.n_samples=2", "rollout.max_new_tokens=16"), None),
    "dpo_8b_2nodes": ((), math.log(2)),
}  # fmt: skip


QWEN3 = """{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% if not enable_thinking %}. {% endif %}{% endif %}"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of the shapes that the recipes' own data sets have, 20 in a file."""

    def said(text: str, role: str = "assistant") -> dict[str, str]:
        return {"role": role, "content": text}

    asked = [said("What is 3 + 4?", "user")]
    shapes: dict[str, dict[str, object]] = {
        "pairs": {"chosen": [*asked, said("It is 7.")], "rejected": [*asked, said("No idea.")], "score_chosen": 9.0},
        "messages": {"messages": [*asked, said("It is 7.")], "source": "a", "num_turns": 1},
        "problems": {"question": "What is 3 + 4?", "answer": "Three and four is <<3+4=7>>7.\n#### 7"},
    }
    for name, row in shapes.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 20, encoding="utf-8")
    return tmp_path


@pytest.fixture
def qwen3(tmp_path: Path) -> None:
    """A small Qwen3 with random weights, and with a template that reads `enable_thinking`, as Qwen's does."""
    shape = Qwen3Config(vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
                        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=40960)  # fmt: skip
    place = saved(tmp_path / "qwen3", shape)
    (place / "chat_template.jinja").write_text(QWEN3, encoding="utf-8")


def composed(name: str) -> Config:
    return compose_elsewhere(RECIPES[name].words)


def words_on_cpu(name: str) -> list[str]:
    kind = {"sft": "messages", "grpo": "problems"}.get(composed(name).loss.name, "pairs")
    given = [*CPU, f"data.path={kind}.jsonl", *SMALL[name][0]]
    if isinstance(composed(name).data, JsonlDataConfig):  # it has no splits, and names a file that a command makes
        given = [each for each in given if not each.startswith(("data.eval_split=", "data.path="))]
    last = {each.partition("=")[0]: each for each in given}
    return [f"+experiment={name}", *last.values()]


def test_every_recipe_is_tested_and_on_the_page() -> None:
    assert RECIPES.keys() == SMALL.keys()
    assert {each for each, *_ in filled(table_under(MEASURED, "predicted"))[2:]} == {f"`{name}`" for name in RECIPES}


@pytest.mark.parametrize("name", SMALL)
def test_what_a_recipe_says_of_itself_is_so(name: str) -> None:
    """Its commands are its own, and it composes for the hardware that it names; the pages and the numbers agree."""
    said, cfg, page = RECIPES[name].said, composed(name), PAGE.read_text(encoding="utf-8")
    assert list(said) == ["Needs", "Command", "Check", "Hardware", "Predicted", "Expect", "After"]
    command = said["Command"].partition("\n")[0]
    assert command.endswith(f" rlexp +experiment={name}")
    assert command in page
    assert shlex.split(said["Check"])[:3] == ["python", "-m", "rlexp.preflight"]
    assert RECIPES[name].words[:2] == [f"+experiment={name}", "hardware=h100"]
    gpus = cfg.parallel.world_size
    assert said["Hardware"].startswith(f"{gpus} × H100 of 80 GB")
    (row,) = [cells for cells in filled(table_under(MEASURED, "predicted")) if cells[0] == f"`{name}`"]
    assert row[1] == f"{gpus} × h100"
    assert row[3] == f"{cfg.data.max_length:,}"
    assert said["Predicted"].startswith(
        f"{row[4]} GiB of {row[5]} a GPU, about {row[7]} s a step (rows of {bench.USUAL} tokens: {row[9]} s); "
    )
    assert f"| [`{name}`](#" in page
    assert cfg.model.path == "Qwen/Qwen3-8B"
    assert "lr:" not in (bench.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")  # the default of the loss


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_fits_as_the_page_says(name: str) -> None:
    """Its memory on the hardware that it names is what the page has, to a hundredth."""
    (row,) = [cells for cells in filled(table_under(MEASURED, "predicted")) if cells[0] == f"`{name}`"]
    measured = [float(row[place]) for place in (4, 5, 7, 8, 9)]
    assert alone(both_predicted, name) == pytest.approx(measured, rel=0.01)


def both_predicted(name: str) -> list[float]:
    """Predict the longest rows and usual ones, in a process that has run no backward pass, as a rehearsal needs it."""
    for place in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a rank, which it is no more
        os.environ.pop(place, None)
    found = bench.predicted(RECIPES[name], 2)
    usual = bench.predicted(RECIPES[name], 2, *bench.usual_rows(found.cfg))
    return [found.peak, found.limit, found.seconds, usual.peak, usual.seconds]


@pytest.mark.parametrize("name", [name for name in SMALL if name != "dpo_8b_2nodes"])
def test_a_recipe_trains_a_small_model_on_a_cpu(rlexp: Shell, rows: Path, qwen3: None, name: str) -> None:
    if name == "dpo_8b_128k":
        made = warm.run("rlexp.long_pairs", ["--tokens=2000", "--pairs=20", f"--texts={ROOT / 'rlexp/training'}"], rows)
        assert made.returncode == 0, made.stderr
    answer = rlexp(*words_on_cpu(name))
    assert answer.returncode == 0, answer.stderr
    check(rows / "run", name)


def test_the_recipe_for_two_nodes_trains_under_two_torchruns(rows: Path) -> None:
    (code, told), (other, _) = on_two_nodes(rows, *words_on_cpu("dpo_8b_2nodes"))
    assert (code, other) == (0, 0), told
    assert run_json(rows / "run")["sizes"]["dp_size"] == 2
    check(rows / "run", "dpo_8b_2nodes")


def check(run: Path, name: str) -> None:
    first, second = rows_of(run)
    wanted = SMALL[name][1]
    assert wanted is None or first["train/loss"] == pytest.approx(wanted, abs=1e-6)
    assert second["train/grad_norm"] >= 0
    assert {each for each in second if each.startswith("eval/")}
    assert (run / "model" / ("adapter_config.json" if "lora" in name else "config.json")).is_file()


# ---- where it cannot run ----


@pytest.mark.parametrize("name", SMALL)
def test_without_a_gpu_a_recipe_says_what_can_be_done(rlexp: Shell, name: str) -> None:
    answer = rlexp(f"+experiment={name}", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 1
    assert re.fullmatch(
        r"rlexp: launch\.device=cuda: no GPU is visible on this machine\. .* hardware=h100; .* launch\.nproc=8; .*\n",
        answer.stderr,
    )

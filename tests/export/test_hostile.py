"""A checkpoint from a stranger runs no code: not of its model, whatever its own configuration says of trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rlexp.run_files.checkpoint_folder import MANIFEST, MODEL, POSITION, _digest, described, latest_first
from tests.helpers import warm
from tests.helpers.models import saved
from tests.helpers.paths import ROOT

SMALL = LlamaConfig(vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
RUN = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "train.max_steps=1", "data.size=8", "data.eval_size=2",
       "train.batch_size=4", "checkpoint.save_every=1", "checkpoint.export=false")  # fmt: skip
CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({ran!r}).touch()
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model, in its checkpoint and in the folder that it names, is code."""
    place = tmp_path_factory.mktemp("stranger")
    model = saved(place / "model", SMALL)
    done = warm.run("rlexp", [*RUN, "model=hf", f"model.path={model}"], place)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = latest_first(place / "run")
    for folder in (model, checkpoint / MODEL):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": "evil", "auto_map": {"AutoConfig": "conf_evil.EvilConfig"}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "conf_evil.py").write_text(CODE.format(ran=str(place / "ran")), encoding="utf-8")
    position = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
    position["config"]["model"]["trust_remote_code"] = True
    (checkpoint / POSITION).write_text(json.dumps(position), encoding="utf-8")
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    del manifest["sha256"]
    manifest["files"] = {name: described(checkpoint / name) for name in manifest["files"]}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest(manifest)}), encoding="utf-8")
    return place


MODEL_WORDS = ("model=hf", "model.path=model", "launch.device=cpu", "logger=none", "data.size=8")
TRUST = "model.trust_remote_code=true"
RUNS_IT = {  # commands that load a model: their words, and the words by which a user trusts it
    "rlexp": ((*MODEL_WORDS, "hydra.run.dir=again", "train.max_steps=1"), TRUST),
    "rlexp.export": (("run", "--out", "out"), "--trust-remote-code"),
    "rlexp.generate": (("run", "--prompt", "hi", "launch.device=cpu"), TRUST),
    "rlexp.eval": (("run", "launch.device=cpu"), TRUST),
    "rlexp.verify": (MODEL_WORDS, TRUST),
    "rlexp.preflight": ((*MODEL_WORDS, "launch.device=cuda", "hardware=h100", "launch.nproc=1"), TRUST),
    "rlexp.data": (MODEL_WORDS, TRUST),
    "rlexp.long_pairs": (("model=hf", "model.path=model", "--pairs", "1", "--tokens", "1000", "--out", "pairs"), TRUST),
}
TOKENIZES = ("rlexp.data", "rlexp.long_pairs")  # whose tokenizer is no code of its own
LOOKS = {  # commands that load none
    "rlexp.compare": ("run",),
    "rlexp.convert": ("recipe.yaml", "--trainer", "dpo", "--gpus", "1"),
    "rlexp.dashboard": ("--dry-run",),
    "rlexp.recipe": (),
    "rlexp.status": ("run",),
}


def test_each_command_is_tried() -> None:
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "rlexp").rglob("__main__.py")}
    assert found == {*RUNS_IT, *LOOKS}


@pytest.mark.parametrize(
    "module",
    [pytest.param(module, marks=[] if module in ("rlexp", "rlexp.export", "rlexp.eval") else pytest.mark.slow)
     for module in RUNS_IT],
)  # fmt: skip
def test_no_command_runs_a_model_s_code_by_itself(stranger: Path, module: str) -> None:
    words, trust = RUNS_IT[module]
    done = warm.run(module, words, stranger)
    assert not (stranger / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (module not in TOKENIZES)
    assert trust in done.stderr.splitlines()[-1] or module in TOKENIZES


@pytest.mark.slow
@pytest.mark.parametrize("module", LOOKS)
def test_a_command_that_only_looks_runs_no_code(stranger: Path, module: str) -> None:
    """A recipe that trusts the model, an experiment made of it, and a folder of runs."""
    recipe = "model_name_or_path: model\ndataset_name: org/d\ntrust_remote_code: true\n"
    (stranger / "recipe.yaml").write_text(recipe, encoding="utf-8")
    done = warm.run(module, LOOKS[module], stranger)
    assert not (stranger / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "module", [pytest.param(module, marks=[] if module == "rlexp.export" else pytest.mark.slow) for module in RUNS_IT]
)
def test_it_runs_where_this_command_line_says_so(stranger: Path, module: str) -> None:
    words, trust = RUNS_IT[module]
    more = ("--out", f"trusted by {module}") if "--out" in words else ()
    warm.run(module, (*words, *more, trust), stranger)
    assert (stranger / "ran").exists()
    (stranger / "ran").unlink()

"""A checkpoint from a stranger runs no code: not of its model, whatever its own configuration says of trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rlexp.run_files.checkpoint_folder import MANIFEST, MODEL, POSITION, _digest, described, latest_first
from tests.helpers import warm
from tests.helpers.models import saved

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


@pytest.mark.parametrize(
    ("module", "words", "remedy"),
    [
        ("rlexp.export", ("run", "--out", "out"), "--trust-remote-code"),
        ("rlexp.generate", ("run", "--prompt", "hi", "launch.device=cpu"), "model.trust_remote_code=true"),
        ("rlexp.eval", ("run", "launch.device=cpu"), "model.trust_remote_code=true"),
    ],
)
def test_no_command_runs_the_code_of_a_checkpoint(
    stranger: Path, module: str, words: tuple[str, ...], remedy: str
) -> None:
    done = warm.run(module, words, stranger)
    assert done.returncode == 1
    assert not (stranger / "ran").exists(), done.stderr
    assert remedy in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_runs_where_this_command_line_says_so(stranger: Path) -> None:
    warm.run("rlexp.export", ("run", "--out", "trusted", "--trust-remote-code"), stranger)
    assert (stranger / "ran").exists()
    (stranger / "ran").unlink()

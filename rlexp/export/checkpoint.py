"""Export a checkpoint as a model folder, in one process and without an engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from rlexp.base.errors import CheckpointError
from rlexp.config.load import from_plain
from rlexp.config.schema import Config, ExportDtype, Precision
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint.tensors import Reader
from rlexp.training.model.export import described, dtype_of, export
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.policy import CRITIC
from rlexp.training.model.score_head import has_score_head


def export_checkpoint(source: Path, out: Path | None, dtype: ExportDtype) -> Path:
    """Write the model and return its folder."""
    checkpoint = _newest_whole(source)
    above = checkpoint.parent
    place = out or (above.parent if above.name == checkpoint_folder.FOLDER else above) / f"model-{checkpoint.name}"
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place}: exists already. Give a new or empty folder: --out FOLDER.")
    cfg = from_plain(checkpoint_folder.read_position(checkpoint)["config"])
    reader = Reader(checkpoint, checkpoint_folder.read_manifest(checkpoint))
    model, tokenizer = described(checkpoint / checkpoint_folder.MODEL, cfg.model)
    chosen = dtype_of(dtype, bf16=cfg.train.precision is Precision.bf16)
    model, others = _others(cfg, model, {name for name in reader.shapes if not name.startswith(CRITIC)})
    names = [name for name, _ in model.named_parameters()]
    weights = ((name, others[name] if name in others else reader.whole("weight", name)) for name in names)
    unfinished = place.resolve().with_name(f".{place.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        export(model, weights, chosen, tokenizer, unfinished)
        unfinished.replace(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return place


def _newest_whole(source: Path) -> Path:
    reasons = []
    for checkpoint in checkpoint_folder.named(source):
        try:
            manifest = checkpoint_folder.check_sizes(checkpoint)
            checkpoint_folder.check_contents(checkpoint, manifest["files"], manifest)
            return checkpoint
        except CheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError(f"{source}: there is no whole checkpoint. {' '.join(reasons)}")


def _others(cfg: Config, model: Any, trained: set[str]) -> tuple[Any, dict[str, Tensor]]:
    """Return the parameters that were not trained. The checkpoint lacks them; they come from the starting model."""
    missing = [name for name, _ in model.named_parameters() if name not in trained]
    kept = [name for name in model.state_dict() if name in dict(model.named_buffers())]
    if not missing and not kept:
        return model, {}
    config, scores = load_config(cfg.model, cfg.data.max_length), has_score_head(model.config)
    base = load_model(cfg.model, config, cfg.data.max_length, scores=scores)
    return base, {name: tensor.detach() for name, tensor in base.named_parameters() if name in missing}

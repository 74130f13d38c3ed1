"""Export a checkpoint as a model folder, in one process and without an engine."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlexp.base.errors import CheckpointError
from rlexp.config.load import from_plain
from rlexp.config.schema import Config, ExportDtype, HFModelConfig, LoraConfig
from rlexp.config.schema.models import Precision
from rlexp.config.trust import TRUST, without_code
from rlexp.launch import run_folder
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint.restore import Reader
from rlexp.training.model.adapter import layers_of, original_name
from rlexp.training.model.export import AdapterExport, Export, described, dtype_of, export
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.policy import CRITIC, DTYPES
from rlexp.training.model.score_head import has_score_head

Weights = Iterator[tuple[str, Tensor]]


def export_checkpoint(
    source: Path, out: Path | None, dtype: ExportDtype, *, merged: bool = False, trusted: bool = False
) -> Path:
    """Write the model, or the adapter that was trained, and return its folder. `merged`: the model with the adapter in
    it. `trusted`: Python code that comes with the model may run."""
    checkpoint = _newest_whole(source)
    above = checkpoint.parent
    place = out or (above.parent if above.name == checkpoint_folder.FOLDER else above) / f"model-{checkpoint.name}"
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place}: exists already. Give a new or empty folder: --out FOLDER.")
    config = without_code(checkpoint_folder.read_position(checkpoint)["config"], {"reward"})
    cfg = _at_its_commit(from_plain(config), checkpoint)
    if isinstance(cfg.model, HFModelConfig):
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, trust_remote_code=trusted))
    reader = Reader(checkpoint, checkpoint_folder.read_manifest(checkpoint))
    description = checkpoint / checkpoint_folder.MODEL
    try:
        model, tokenizer = described(description, cfg.model)
    except ValueError as error:
        if TRUST not in str(error):
            raise
        raise CheckpointError(
            f"{description}: its model is Python code that comes with it. If you trust it, add --trust-remote-code."
        ) from None
    adapter = layers_of(model, description) if isinstance(cfg.adapter, LoraConfig) else None
    if merged and adapter is None:
        raise CheckpointError(f"--merged: {checkpoint} holds no adapter. Leave it out: the whole model is written.")
    chosen = dtype_of(dtype, bf16=cfg.train.precision is Precision.bf16)
    unfinished = place.resolve().with_name(f".{place.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if adapter is None:
            model, weights = _weights(cfg, model, reader)
            export(Export(model, chosen, unfinished), weights, tokenizer)
        elif merged:
            weights = _beside_adapter(cfg, model, reader)
            export(Export(model, chosen, unfinished), adapter.merged(weights), tokenizer)
        else:
            trained = ((name, reader.whole("weight", name)) for name in reader.shapes if not name.startswith(CRITIC))
            export(AdapterExport(adapter, cfg.model, dtype_of(dtype), unfinished), trained, tokenizer)
        unfinished.replace(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return place


def _at_its_commit(cfg: Config, checkpoint: Path) -> Config:
    """Hold a hub model to the commit with which the run was started: its branch may have moved since."""
    commit = run_folder.commits(checkpoint).get("model.path")
    if commit is None or not isinstance(cfg.model, HFModelConfig):
        return cfg
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, revision=commit))


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


def _weights(cfg: Config, model: Any, reader: Reader) -> tuple[Any, Weights]:
    """Return the model and its weights. Those that were not trained, which the checkpoint lacks, come from the starting
    model."""
    missing = [name for name, _ in model.named_parameters() if name not in reader.shapes]
    kept = [name for name in model.state_dict() if name in dict(model.named_buffers())]
    if missing or kept:
        model = _starting(cfg, model)
    return model, (
        (name, parameter.detach() if name in missing else reader.whole("weight", name))
        for name, parameter in model.named_parameters()
    )


def _beside_adapter(cfg: Config, model: Any, reader: Reader) -> Weights:
    """Return the weights of the starting model, and of the adapter beside them."""
    base = dict(_starting(cfg, model).named_parameters())
    computing = DTYPES[cfg.train.precision]  # of frozen weights
    for name, _ in model.named_parameters():
        trained = name in reader.shapes
        yield name, reader.whole("weight", name) if trained else base[original_name(name)].detach().to(computing)


def _starting(cfg: Config, like: Any) -> Any:
    config, scores = load_config(cfg.model, cfg.data.max_length), has_score_head(like.config)
    float64 = cfg.train.precision is Precision.fp64
    return load_model(cfg.model, config, cfg.data.max_length, float64=float64, scores=scores)

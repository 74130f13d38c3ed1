"""Build parts of the run apart, one after the other, and find the first that is wrong by itself.

`model/` loads a model, an engine takes its weights, `reference/` asks it, and `train/` puts all of them together. Each
part is built from those before it, which are right: so the first that is wrong is the one to look at. This happens only
after a failure, in ranks of its own.

Shape letters: T packed tokens, t tokens of this rank, S sequences.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import UserError, first_line
from rlexp.base.made_once import Appending
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.schema import Config, EngineName, LoraConfig, NoAdapterConfig
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.losses import CriticName
from rlexp.config.schema.models import Precision, ReferenceName
from rlexp.training.engine.frozen import Frozen
from rlexp.training.engine.streamed import Streamed
from rlexp.training.model.adapter import without_starting
from rlexp.training.model.fused.classes import fuses
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.placing import EXACT, Placing, by_rows, evenly, put_all
from rlexp.training.model.policy import DTYPES, Critic, Policy
from rlexp.training.model.prepared import named_base
from rlexp.training.model.reward_model import here
from rlexp.training.reference.models import OfAdapter, OfModel, Reference
from rlexp.training.reference.stored import Kept, ReferenceRows, Stored, appended, types_of
from rlexp.training.reference.stored import SequenceValues as StoredValues
from rlexp.training.train.build import build_policy, pieces_for, placing_for, placing_of_frozen
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.surroundings import HERE
from rlexp.training.train.task import Task
from rlexp.training.types import Floats, Pack, SequenceName, Shard, Wanted
from rlexp.training.world.shared_memory import Neighbours
from rlexp.verify.findings import Clue
from rlexp.verify.given_samples import task_on
from rlexp.verify.modules import ENGINE, MODEL, REFERENCE, ROLLOUT, TRAIN
from rlexp.verify.records import Array, Key, TensorFiles

ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, LookupError, RuntimeError, TypeError,
          ValueError, UserError)  # fmt: skip


@dataclass(frozen=True)
class Differing:
    """Log-probabilities, or scores, of the step's sequences: the run's, and the reference's."""

    got: Mapping[Key, Array] = field(default_factory=dict)
    wanted: Mapping[Key, Array] = field(default_factory=dict)


def _finite(apart: Array) -> Array:
    """The size of differences; NaN, infinite and other senseless ones are alike, and may be squared and added up."""
    return np.minimum(np.nan_to_num(np.abs(apart), nan=np.inf), 1e6)


@dataclass(frozen=True)
class Scene:
    """A task of the run, built anew, with what is tried on it: packs of sequences, and the weights to take."""

    task: Task
    packs: Sequence[tuple[Pack, Sequence[Key]]]
    step: int
    steps: int  # of the verification
    files: TensorFiles  # the reference's weights
    said: Differing

    @property
    def cfg(self) -> Config:
        return self.task.run.cfg

    def apart(self, says: Callable[[Pack, Sequence[Key]], Tensor]) -> Tensor:
        """Return how far a part is from what it should say on this rank's sequences, and how far the run is.

        Only tokens count at which the run is clearly wrong: at others rounding may be all that differs."""
        shares = torch.zeros(2, dtype=torch.float64)
        for pack, keys in self.packs:
            found = says(pack, keys)
            for number, key in enumerate(keys):
                wanted = self.said.wanted[key]
                ours, run = (_finite(each - wanted) for each in (self._of(number, pack, found), self.said.got[key]))
                wide = run > self._half
                shares += torch.tensor([np.square(ours[wide]).sum(), np.square(run[wide]).sum()])
        return shares

    @property
    def _half(self) -> float:
        return max(float(_finite(self.said.got[key] - wanted).max(initial=0.0))
                   for key, wanted in self.said.wanted.items()) / 2  # fmt: skip

    def _of(self, number: int, pack: Pack, values: Tensor) -> Array:
        """The values of a sequence: of a pack's trained tokens, or of its sequences."""
        if self.task.wanted.scores:
            return values[number : number + 1].numpy()
        return values[pack.sequence_N == number].numpy()

    def by_pack(self, shard: Shard, values_n: Tensor, pack: Pack) -> Tensor:
        """Put a ring's values together: of all trained tokens, (N,), or the scores of all sequences, (S,)."""
        run = self.task.run
        whole = torch.zeros(pack.sequences if self.task.wanted.scores else len(pack.place_N), dtype=torch.float64,
                            device=run.device)  # fmt: skip
        at = shard.ended_n if self.task.wanted.scores else shard.listed_n
        assert at is not None
        whole[at] = values_n.detach().double()
        dist.all_reduce(whole, group=run.world.ring.group)
        return whole.cpu()

    def of_model(self, forward: Callable[[Shard], Any]) -> Callable[[Pack, Sequence[Key]], Tensor]:
        """Return a function that applies a forward pass to a pack. A collective call."""

        @torch.no_grad()
        def says(pack: Pack, _keys: Sequence[Key]) -> Tensor:
            shard = self.task.run.shard(pack)
            if self.task.wanted.scores:
                here_S, place_S = here(shard, pack.end_S)
                ended_n = here_S.nonzero().squeeze(-1)
                shard = dataclasses.replace(shard, ends_n=place_S[ended_n], ended_n=ended_n)
            shard = shard.to(self.task.run.device)
            said = forward(shard)
            values_n = said if isinstance(said, Tensor) else said.scores_n if self.task.wanted.scores else said.logps_n
            return self.by_pack(shard, values_n, pack)

        return says

    def of_reference(self, reference: Reference) -> Callable[[Pack, Sequence[Key]], Tensor]:
        """Return a function that asks a reference about a pack. A collective call."""
        sides = list(dict.fromkeys(side for _, side in self.said.wanted))

        def says(pack: Pack, keys: Sequence[Key]) -> Tensor:
            names = tuple(SequenceName(False, index, sides.index(side)) for index, side in keys)
            pack = dataclasses.replace(pack, names=names)
            shard = reference.known(pack, self.task.run.shard(pack)).to(self.task.run.device)
            return self.by_pack(shard, reference.logps(shard), pack)

        return says

    def with_weights(self, policy: Policy) -> Policy:
        """Give a policy the weights from before the step."""
        for name, parameter in without_starting(policy.named()):
            before = torch.from_numpy(self.files.read("weights", self.step - 1, name).copy())
            parameter.data.copy_(before.to(parameter.dtype))
        return policy


# ---- what is built ----


def model_apart(task: Task, cfg: Config, wanted: Wanted, placing: Placing | None, *, copied: bool = False) -> Policy:
    """Build a policy from `training/model/` alone. `copied`: beside its adapter, one that stays as it began."""
    config = load_config(cfg.model, cfg.data.max_length)
    temperature = cfg.rollout.temperature if cfg.loss.draws else 1.0  # and not the task's, which may be wrong
    options: dict[str, Any] = {"float64": cfg.train.precision is Precision.fp64}
    model = load_model(cfg.model, config, cfg.data.max_length, placing, scores=wanted.scores, **options)
    critic = None
    if wanted.values is not None:
        own = wanted.values is CriticName.own
        trunk = load_model(cfg.model, config, cfg.data.max_length, placing, **options).base_model if own else None
        critic = Critic(model.get_output_embeddings().in_features, trunk)
    policy = Policy(model, critic, dataclasses.replace(wanted, temperature=temperature))
    if isinstance(cfg.adapter, LoraConfig):
        policy.adapt(cfg.adapter, base=named_base(cfg.model), seed=cfg.seed, copy=copied)
    if placing is None:
        policy.to(task.run.device)
    else:
        put_all(policy, placing)
    policy.freeze(cfg.model.freeze)
    if fuses(cfg.model.fused, task.run.device, DTYPES[cfg.train.precision]):
        policy.fuse()
    return policy


def of_starting_model(cfg: Config) -> Config:
    """The configuration of the model that the policy is compared with."""
    if cfg.reference.path is not None:
        cfg = dataclasses.replace(cfg, model=model_of_reference(cfg))
    if cfg.reference.path is not None or (isinstance(cfg.adapter, LoraConfig) and cfg.adapter.path is None):
        cfg = dataclasses.replace(cfg, adapter=NoAdapterConfig())
    return cfg


def frozen_apart(task: Task, policy: Policy, among: Neighbours | None) -> Frozen:
    """Hold a model as the run's engine holds what nothing trains."""
    cfg, run = task.run.cfg, task.run
    offloaded = run.device if cfg.reference.offload else None
    match cfg.engine.name:
        case EngineName.fsdp2:
            from rlexp.training.engine.fsdp2 import FrozenRows

            return FrozenRows(policy, run.world, run.dtype, offloaded)
        case EngineName.zero3:
            from rlexp.training.engine.zero import FrozenPieces

            return FrozenPieces(cfg.engine, policy, run.world, run.dtype)
        case other:
            return Frozen(other.value, policy) if offloaded is None else Streamed(other.value, policy, offloaded, among)


# ---- what is tried, in the order in which a part is built of those before it ----

Part = tuple[str, str, Callable[[], Tensor]]  # the module, the part in words, and how far apart it is (`Scene.apart`)


@dataclass(frozen=True)
class Tried:
    """The module at fault, and what was tried to find it, in words."""

    module: str
    said: str = ""


def tried(scene: Scene, clue: Clue) -> Tried:
    """Try one part after the other until one is wrong. A collective call."""
    if clue in (Clue.POLICY, Clue.REFERENCE) and not scene.said.wanted:
        return Tried(_rest(scene, clue), "its parts cannot be tried: the run has other tokens")
    parts = {Clue.POLICY: of_policy, Clue.REFERENCE: of_reference, Clue.START: of_start, Clue.TRAINED: of_trained}
    said = []
    for module, words, apart in parts[clue](scene):
        wrong, raised = _wrong(apart)
        said.append(f"{words} {raised or ('is wrong' if wrong else 'is right')}")
        if wrong:
            return Tried(module, "; ".join(said))
    return Tried(_rest(scene, clue), "; ".join(said))


def _wrong(apart: Callable[[], Tensor]) -> tuple[bool, str]:
    """Say whether a part is wrong on any rank, and what it raised on this one. A collective call.

    It is wrong if it is nearer to what the run says than to what it should say, or raises."""
    raised = ""
    try:
        shares = apart()
    except ERRORS as error:
        shares, raised = torch.tensor([torch.inf, 0.0], dtype=torch.float64), f"raises {type(error).__name__}"
        raised += f" ({first_line(error)})"
    dist.all_reduce(shares)
    return not bool(shares[0] <= shares[1] / 4), raised


def _if(wrong: bool) -> Tensor:
    """Return shares of a part that is either right or wrong."""
    return torch.tensor([float(wrong), 0.0], dtype=torch.float64)


def _rest(scene: Scene, clue: Clue) -> str:
    """The module that remains if all parts are right by themselves."""
    match clue:
        case Clue.REFERENCE:
            return ROLLOUT if scene.cfg.loss.draws else TRAIN  # what is kept of a rollout; what a step is given
        case Clue.POLICY:
            return TRAIN if _takes_weights(scene) else ENGINE
        case _:
            return ENGINE


def _takes_weights(scene: Scene) -> bool:
    """Return whether the engine, as it is built, has the weights from before the step, or can be given them."""
    return scene.step == 1 or not ENGINES[scene.cfg.engine.name.value].sharded


def computing(scene: Scene) -> Placing:
    """Return where the weights of a policy go that only computes."""
    return Placing(scene.task.run.device, DTYPES[scene.cfg.train.precision])


def whole_on_ranks(cfg: Config) -> Config:
    """The configuration with an engine under which every rank has whole weights."""
    return dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, name=EngineName.torch))


def of_policy(scene: Scene) -> Iterator[Part]:
    task, cfg = scene.task, scene.cfg

    def alone() -> Tensor:
        policy = model_apart(task, cfg, task.wanted, computing(scene))
        return scene.apart(scene.of_model(scene.with_weights(policy)))

    def built() -> Tensor:
        config = load_config(cfg.model, cfg.data.max_length)
        policy = build_policy(whole_on_ranks(cfg), config, task.run.device, task.wanted, computing(scene))
        return scene.apart(scene.of_model(scene.with_weights(policy)))

    def engine() -> Tensor:
        if scene.step > 1:
            scene.with_weights(task.run.engine.policy)
        return scene.apart(scene.of_model(task.run.engine.forward))

    yield MODEL, "the model alone", alone
    yield TRAIN, "the model as the run builds it", built
    if _takes_weights(scene):
        yield ENGINE, "the engine's forward pass", engine


def of_reference(scene: Scene) -> Iterator[Part]:
    if scene.cfg.reference.name is ReferenceName.adapter:
        yield from _of_adapter(scene)
    else:
        yield from _of_frozen(scene)
    stored = scene.cfg.reference.name is ReferenceName.precompute
    if stored:
        yield REFERENCE, "a value that is stored and read back", lambda: _if(stored_wrong(scene))
    if scene.step > 1 and _takes_weights(scene):
        scene.with_weights(scene.task.run.engine.policy)  # a reference must not follow them
    built: Any = scene.task.rollouts.scorer if isinstance(scene.task, RolloutTask) else scene.task
    as_built = scene.of_reference(built.reference)
    if stored and _wrong(lambda: scene.apart(as_built))[0]:
        yield TRAIN, "a second computation of the reference", lambda: computed_again(scene)
        yield REFERENCE, "the reference that was found on this machine", lambda: _if(True)
    yield TRAIN, "the reference as the run builds it", lambda: scene.apart(as_built)


def _of_adapter(scene: Scene) -> Iterator[Part]:
    task, engine = scene.task, scene.task.run.engine
    wanted = dataclasses.replace(task.wanted.frozen, values=task.wanted.values)

    def starting(policy: Policy, forward: Callable[[Shard], Any]) -> Callable[[Shard], Any]:
        def says(shard: Shard) -> Any:
            with policy.starting():
                return forward(shard)

        return says

    def alone() -> Tensor:
        policy = scene.with_weights(model_apart(task, scene.cfg, wanted, computing(scene), copied=True))
        return scene.apart(scene.of_model(starting(policy, policy)))

    yield MODEL, "the model without its adapter", alone
    if _takes_weights(scene):
        if scene.step > 1:
            scene.with_weights(engine.policy)
        forward = starting(engine.policy, engine.forward)
        yield ENGINE, "the engine's forward pass without the adapter", lambda: scene.apart(scene.of_model(forward))
        yield REFERENCE, "the reference alone", lambda: scene.apart(scene.of_reference(OfAdapter(engine)))


def _of_frozen(scene: Scene) -> Iterator[Part]:
    task, cfg, run = scene.task, of_starting_model(scene.cfg), scene.task.run
    wanted = task.wanted.frozen
    held: list[Frozen] = []

    def alone() -> Tensor:
        return scene.apart(scene.of_model(model_apart(task, cfg, wanted, computing(scene))))

    def frozen() -> Tensor:
        placing, among = placing_of_frozen(cfg, run, HERE)
        with pieces_for(cfg.engine):
            policy = model_apart(task, cfg, wanted, placing)
        held.append(frozen_apart(task, policy, among))
        return scene.apart(scene.of_model(held[0].forward))

    yield MODEL, "the reference model alone", alone
    yield ENGINE, "the reference model as the engine holds it", frozen
    yield REFERENCE, "the reference alone", lambda: scene.apart(scene.of_reference(OfModel(held[0])))


def stored_wrong(scene: Scene) -> bool:
    """Store right values of this rank's sequences, read them back, and lay them on its packs."""
    cfg, task = scene.cfg, scene.task
    indices = sorted({index for _, keys in scene.packs for index, _ in keys})
    sides = list(dict.fromkeys(side for _, side in scene.said.wanted))
    exact = np.float64 if cfg.train.precision is Precision.fp64 else np.float32
    values: dict[Key, Floats] = {
        (index, side): scene.said.wanted[index, side].astype(exact) for index in indices for side in sides
    }
    path = scene.files.folder / f"stored-{task.run.world.rank}"
    shutil.rmtree(path, ignore_errors=True)
    making = Appending(path, types_of(cfg.train.precision))
    appended(making, list(values.values()), len(indices))
    making.finish({})
    rows = ReferenceRows(False, task.examples.train, np.array(indices))
    stored = Stored([Kept(rows, StoredValues.mapped(path, cfg.train.precision))], cfg.train.precision)
    says, wrong = scene.of_reference(stored), False
    for pack, keys in scene.packs:
        found = says(pack, keys)
        wrong |= any(not np.array_equal(found[pack.sequence_N == number].numpy(), values[key].astype(np.float64))
                     for number, key in enumerate(keys))  # fmt: skip
    return wrong


def computed_again(scene: Scene) -> Tensor:
    """Compute the values once more, into an empty folder. What was found wrong on this machine is then of other rows or
    weights than its key says."""
    cfg, folder, before = scene.cfg, str(scene.files.folder / "computed again"), os.environ.get("RLEXP_CACHE")
    if isinstance(cfg.data, RowsDataConfig):
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, cache=folder))
    os.environ["RLEXP_CACHE"] = folder
    try:
        task: Any = task_on(cfg, None, steps=scene.steps)
    finally:
        os.environ.pop("RLEXP_CACHE")
        if before is not None:
            os.environ["RLEXP_CACHE"] = before
    return scene.apart(scene.of_reference(task.reference))


def of_start(scene: Scene) -> Iterator[Part]:
    task, cfg, run = scene.task, scene.cfg, scene.task.run
    copied = task.wanted.reference and cfg.reference.name is ReferenceName.adapter
    traits, dtype = ENGINES[cfg.engine.name.value], DTYPES[cfg.train.precision]
    part = partial(by_rows if traits.sharded else evenly, run.world.rank, run.world.size)
    masters = torch.promote_types(dtype, torch.float32)
    # As an engine needs it: a piece of it; whole, in the dtype of its masters; or whole, beside the bits that are lost.
    held = masters if traits.sharded or traits.replicated else dtype
    exact = Placing(run.device, held, part, whole=not traits.sharded)

    def built() -> Policy:
        config = load_config(cfg.model, cfg.data.max_length)
        return build_policy(cfg, config, run.device, task.wanted, placing_for(cfg, run.device, run.world))

    def wrong(make: Callable[[], Policy]) -> Callable[[], Tensor]:
        return lambda: _if(other_weights(make(), scene.files, part))

    yield MODEL, "the model as it is loaded", wrong(lambda: model_apart(task, cfg, task.wanted, None, copied=copied))
    yield MODEL, "the model in its place", wrong(lambda: model_apart(task, cfg, task.wanted, exact, copied=copied))
    if not traits.loads_pieces:
        yield TRAIN, "the model as the run builds it", wrong(built)


def other_weights(policy: Policy, files: TensorFiles, part: Callable[[torch.Size], slice]) -> bool:
    """Return whether a policy has other starting weights than the reference, with the bits kept beside them."""
    held = dict(without_starting(policy.named()))
    if sorted(held) != files.names("weights", 0):
        return True
    for name, parameter in held.items():
        meant = torch.from_numpy(files.read("weights", 0, name).copy())
        mine = getattr(parameter, EXACT, None)
        if mine is not None:
            meant = meant.reshape(-1)[part(meant.shape)]
        elif parameter.requires_grad:
            mine = parameter.detach()
        else:  # of what nothing trains, no more is kept than computes
            mine, meant = parameter.detach(), meant.to(parameter.dtype)
        read = torch.promote_types(mine.dtype, torch.float32)  # what a file has beyond it, no run has
        if mine.shape != meant.shape or not torch.equal(mine.cpu().to(read), meant.to(read)):
            return True
    return False


def of_trained(scene: Scene) -> Iterator[Part]:
    task, cfg = scene.task, whole_on_ranks(scene.cfg)
    config, meant = load_config(cfg.model, cfg.data.max_length), scene.files.names("gradient", scene.step)

    def others(policy: Policy) -> Tensor:
        return _if(sorted(name for name, parameter in policy.named() if parameter.requires_grad) != meant)

    def alone() -> Tensor:
        return others(model_apart(task, cfg, task.wanted, computing(scene)))

    def built() -> Tensor:
        return others(build_policy(cfg, config, task.run.device, task.wanted, computing(scene)))

    yield MODEL, "the model's own choice of trained parameters", alone
    yield TRAIN, "the choice of trained parameters as the run builds the model", built

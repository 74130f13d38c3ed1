"""Defects to plant into the product from outside, and where `verify` must say they are.

A defect is an exact replacement in the text of one module, which must fit exactly once. It is planted into the ranks
after they were forked: the changed text is compiled and the functions that are there get the new code, so that every
reference to them sees it. Nothing on disk changes, and the product has no hook for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rlexp.launch.place import Place

PACKAGE = Path(__file__).resolve().parent.parent / "rlexp"
# Two replicas of a ring of 2, four micro-batches of two pairs a step; clipping, decay and warm-up at work.
BASE = ("launch.device=cpu", "logger=none", "seed=3", "parallel=ring2", "launch.nproc=4", "train.batch_size=8",
        "train.micro_batch_size=2", "data.size=20", "data.eval_size=0", "optim.lr=1e-3", "optim.weight_decay=0.1",
        "optim.max_grad_norm=0.5", "optim.warmup_steps=1")  # fmt: skip
FP64 = (*BASE, "train.precision=fp64")

DATA, RING, MODEL, ALGOS = "rlexp/data/", "rlexp/ring/", "rlexp/model/", "rlexp/algos/"
TRAIN, ENGINE, METRICS = "rlexp/train/", "rlexp/engine/", "rlexp/metrics/"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # below rlexp/
    changes: tuple[tuple[str, str], ...]
    stage: str
    room: str
    overrides: tuple[str, ...] = FP64
    step: int | None = None  # where it must first be seen

    def changed(self) -> str:
        """The text of the module with the defect."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.name}: {old!r} stands {text.count(old)} times in {self.file}"
            text = text.replace(old, new)
        return text

    def plant(self) -> None:
        """Into this process."""
        module = importlib.import_module("rlexp." + self.file.removesuffix(".py").replace("/", "."))
        scratch: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
        exec(compile(self.changed(), module.__file__ or "", "exec"), scratch)
        assert _transplant(module, scratch), f"{self.name}: nothing has changed"


def _transplant(module: ModuleType, scratch: dict[str, Any]) -> bool:
    changed = False
    for name, new in scratch.items():
        old = module.__dict__.get(name)
        if inspect.isclass(old) and getattr(old, "__module__", "") == module.__name__:
            for attribute, below in vars(new).items():
                changed |= _swap(vars(old).get(attribute), below)
        elif callable(old) and getattr(old, "__module__", "") == module.__name__:
            changed |= _swap(old, new)
        elif isinstance(old, int | float | str | tuple) and name.isupper() and old != new:
            setattr(module, name, new)
            changed = True
    return changed


def _swap(old: Any, new: Any) -> bool:
    """Give a function the code of another, through decorators, properties and static methods."""
    if isinstance(old, property):
        return _swap(old.fget, new.fget)
    old, new = (inspect.unwrap(getattr(each, "__func__", each)) if callable(each) or hasattr(each, "__func__") else each
                for each in (old, new))  # fmt: skip
    if not isinstance(old, FunctionType) or not isinstance(new, FunctionType):
        return False
    if _same(old, new):
        return False
    old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    return True


def _same(old: FunctionType, new: FunctionType) -> bool:
    return old.__code__ == new.__code__ and old.__defaults__ == new.__defaults__


def faulty_rank(place: Place, fault: Fault, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A rank of a product with a defect."""
    fault.plant()
    return target(place, *args)


def one(name: str, file: str, old: str, new: str, stage: str, room: str, *more: str, base: tuple[str, ...] = FP64,
        step: int | None = None) -> Fault:  # fmt: skip
    return Fault(name, file, ((old, new),), stage, room, (*base, *more), step)


SHORT_BATCH = ("data.size=13", "data.drop_last=false")  # 8 and 5 pairs
EMPTY_REPLICA = ("data.size=9", "data.drop_last=false")  # 8 and 1
CUT = ("data.max_length=100", "data.too_long=truncate")

DATA_FAULTS = (
    one("no end of sequence", "data/tokens.py", "return np.append(answer, np.int32(self.eos_id))", "return answer",
        "data", DATA),
    one("truncated at the wrong side", "data/tokens.py", "return prompt[-longest:]", "return prompt[:longest]",
        "data", DATA, *CUT),
    one("answers cut at their beginning", "data/tokens.py", "pair.chosen[:rest], pair.rejected[:rest]",
        "pair.chosen[-rest:], pair.rejected[-rest:]", "data", DATA, "data.max_length=40", "data.too_long=truncate"),
    one("one token too many is kept", "data/tokens.py", "rest = max_length - len(prompt)",
        "rest = max_length - len(prompt) + 1", "data", DATA, "data.max_length=40", "data.too_long=truncate"),
    one("chosen and rejected swapped", "data/tokens.py", "prompt, (chosen, rejected) =",
        "prompt, (rejected, chosen) =", "data", DATA),
    one("too long is not dropped", "data/tokens.py", "cut = pair.longest() > self.max_length",
        "cut = pair.longest() > self.max_length + 40", "data", DATA, "data.max_length=140", "data.too_long=drop"),
    one("another permutation", "data/sampler.py", "[self.seed, epoch]", "[epoch, self.seed]", "data", DATA),
    one("every epoch the same", "data/sampler.py", "[self.seed, epoch]", "[self.seed, 0]", "data", DATA, "data.size=11",
        "train.epochs=2", step=2),
    one("the seed is ignored", "data/sampler.py", "[self.seed, epoch]", "[0, epoch]", "data", DATA),
    one("not shuffled", "data/sampler.py", "if not self.shuffle:", "if self.shuffle:", "data", DATA),
    one("replicas overlap", "data/sampler.py", "self.indices[replica * share : (replica + 1) * share]",
        "self.indices[replica : replica + share]", "data", DATA),
    one("every replica has the same", "data/sampler.py", "self.indices[replica * share : (replica + 1) * share]",
        "self.indices[:share]", "data", DATA),
    one("the tail of a replica is lost", "data/sampler.py", "share = -(-len(self.indices) // dp_size)",
        "share = len(self.indices) // dp_size", "data", DATA, *SHORT_BATCH, step=2),
    one("the tail of a micro-batch is lost", "data/sampler.py", "count = -(-share // micro_batch_size)",
        "count = share // micro_batch_size", "data", DATA, *SHORT_BATCH, step=2),
    one("the short batch is dropped", "data/sampler.py",
        "return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)",
        "return self.size // self.batch_size", "data", DATA, *SHORT_BATCH),
    one("the run is longer", "data/sampler.py", "return steps_per_epoch * (epochs or 1)",
        "return steps_per_epoch * (epochs or 2)", "data", DATA),
    one("targets not shifted", "data/packing.py", "tokens[start + 1 : start + length]",
        "tokens[start : start + length - 1]", "data", DATA),
    one("targets shifted twice", "data/packing.py",
        "targets[start : start + length - 1] = tokens[start + 1 : start + length]",
        "targets[start : start + length - 2] = tokens[start + 2 : start + length]", "data", DATA),
    one("prompts are trained on", "data/packing.py", "owner[start + len(prompt) - 1 : start + length - 1] = number",
        "owner[start : start + length - 1] = number", "data", DATA),
    one("the first token of an answer is not", "data/packing.py", "owner[start + len(prompt) - 1 :",
        "owner[start + len(prompt) :", "data", DATA),
    one("the end predicts too", "data/packing.py", ": start + length - 1] = number", ": start + length] = number",
        "data", DATA),
    one("positions do not restart", "data/packing.py", "torch.arange(length)", "torch.arange(start, start + length)",
        "data", DATA),
    one("positions off by one", "data/packing.py", "torch.arange(length)", "torch.arange(1, length + 1)", "data", DATA),
    one("padding counts as tokens", "data/packing.py", "Segment(start, length, width)", "Segment(start, width, width)",
        "data", DATA),
    one("sequences in another order", "data/packing.py", "for answer in (pair.chosen, pair.rejected)",
        "for answer in (pair.rejected, pair.chosen)", "data", DATA),
)  # fmt: skip

RING_FAULTS = (
    one("targets shifted after sharding", "ring/shard.py", "pack.targets_T[index]", "pack.tokens_T[index].roll(-1)",
        "data", RING),
    one("positions of the shard", "ring/shard.py", "pack.positions_T[index]", "index.new_tensor(range(len(index)))",
        "data", RING),
    one("rank 0's real tokens everywhere", "ring/shard.py", "deal.real[ring.rank]", "deal.real[0]", "data", RING),
    one("another rank's chunks", "ring/shard.py", "index = deal.places[ring.rank]",
        "index = deal.places[(ring.rank + 1) % ring.size]", "log-probabilities", RING),
    one("sequences see each other", "ring/selection.py", "lengths = tuple(len(each) for each in ranges)",
        "lengths = (sum(len(each) for each in ranges),)", "log-probabilities", RING),
    one("padding is real", "ring/cut.py", "_sizes(segment.length, owners", "_sizes(segment.padded, owners", "data",
        RING),
    one("not causal", "ring/layouts/zigzag.py", "Block(ALL, ALL, causal=True)", "Block(ALL, ALL, causal=False)",
        "log-probabilities", RING),
    one("later keys seen", "ring/layouts/zigzag.py", "Block(ALL, EARLY, causal=False)", "Block(ALL, ALL, causal=False)",
        "log-probabilities", RING),
    one("early queries see later keys", "ring/layouts/zigzag.py", "Block(LATE, ALL, causal=False)",
        "Block(ALL, ALL, causal=False)", "log-probabilities", RING),
    one("a block forgotten", "ring/layouts/zigzag.py", "return Block(LATE, ALL, causal=False)", "return None",
        "log-probabilities", RING),
    one("contiguous chunks, zigzag blocks", "ring/layouts/zigzag.py",
        "[*there, *reversed(there)]", "[rank for rank in there for _ in range(2)]", "log-probabilities", RING),
    one("merged by the maximum", "ring/kernels/base.py", "torch.logaddexp(lse_qH, block_lse_qH, out=lse_qH)",
        "torch.maximum(lse_qH, block_lse_qH, out=lse_qH)", "log-probabilities", RING, "parallel=ring4"),
    one("not a number in the merge", "ring/kernels/base.py", "torch.sigmoid(block_lse_qH - lse_qH)",
        "(block_lse_qH - lse_qH).abs().neg().log()", "log-probabilities", RING),
    one("merged without weights", "ring/kernels/base.py", "out_qHD.lerp_(block_out_qHD, share.unsqueeze(-1))",
        "out_qHD.add_(block_out_qHD)", "log-probabilities", RING),
    Fault("nothing seen yet counts as 0", "ring/rotation.py",
          (("first=source == self.ring.rank", "first=False"), ("q.new_full(q.shape[:2], -torch.inf",
        "q.new_full(q.shape[:2], 0.0")),
          "log-probabilities", RING),
    one("keys of the wrong rank", "ring/rotation.py", "        kv = own_kv = torch.stack((k, v))",
        "        kv = own_kv = torch.stack((k, v)) if ring.rank else torch.stack((v, k))", "log-probabilities", RING),
    one("keys do not move on", "ring/rotation.py", "                kv = coming.wait()",
        "                coming.wait()",
        "log-probabilities", RING),
    one("source counted the other way", "ring/rotation.py", "(ring.rank - step) % ring.size, queries, kv, out",
        "(ring.rank + step) % ring.size, queries, kv, out", "log-probabilities", RING, "parallel=ring4"),
    one("keys do not move on in the backward", "ring/rotation.py", "                kv = coming_kv.wait()",
        "                coming_kv.wait()", "gradient", RING),
    one("dk and dv do not come home", "ring/rotation.py", "dkv = coming_dkv.wait()  # home again",
        "coming_dkv.wait()  # home again", "gradient", RING),
    one("dq of the own block only", "ring/rotation.py", "        add(dq, at, dq_block)", "        dq[at] = dq_block",
        "gradient", RING),
    one("the merge rounds like float32", "ring/kernels/base.py",
        "torch.logaddexp(lse_qH, block_lse_qH, out=lse_qH)",
        "lse_qH.copy_((torch.logaddexp(lse_qH, block_lse_qH) * 2**24).round() / 2**24)", "log-probabilities", RING,
        "parallel=ring4"),
    one("dq in float32", "ring/rotation.py", "return dq, dkv[0]", "return dq.float().to(q.dtype), dkv[0]",
        "gradient", RING),
    one("the kernel's scale", "ring/kernels/cpu_flash.py",
        "_forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)",
        "_forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale * 1.0001)",
        "log-probabilities", RING),
    one("dk for dv", "ring/kernels/cpu_flash.py",
        "(_tokens_first(_joined(parts)) for parts in zip(*results, strict=True))",
        "(_tokens_first(_joined(parts)) for parts in zip(*((a, b, b) for a, b, _ in results), strict=True))",
        "gradient", RING),
    one("the plain kernel's mask", "ring/kernels/plain.py", "torch.arange(keys, device=device) > rows.unsqueeze(1)",
        "torch.arange(keys, device=device) >= rows.unsqueeze(1) + 2", "log-probabilities", RING,
        "parallel.kernel=plain"),
    one("the plain kernel's backward", "ring/kernels/plain.py", '"qhd,khd->hqk", dout, v) - delta)',
        '"qhd,khd->hqk", dout, v))', "gradient", RING, "parallel.kernel=plain"),
    one("the ring's sum in its backward too", "ring/collectives.py", "return grads[0], None",
        "return grads[0] * 2, None",
        "gradient", RING),
    one("the ring is not summed", "ring/collectives.py", "            dist.all_reduce(total, group=_group(ring))",
        "            pass", "log-probabilities", RING),
    one("summed over the replicas too", "ring/collectives.py", "dist.all_reduce(total, group=_group(ring))",
        "dist.all_reduce(total)", "log-probabilities", RING),
    Fault("the ring turns the other way", "ring/collectives.py",
          (("buffer, ring.next_rank", "buffer, ring.previous_rank"),
           ("received, ring.previous_rank", "received, ring.next_rank")),
          "log-probabilities", RING, (*FP64, "parallel=ring4")),
    one("keys between a rank's chunks", "ring/layouts/allgather.py",
        "[range(first.start), range(first.stop, chunk.start)]", "[range(first.start)]", "log-probabilities", RING,
        "parallel.layout=allgather"),
    one("gradients of gathered keys", "ring/layouts/allgather.py", "dkv[-1] += going.pop().wait()",
        "going.pop().wait()", "gradient", RING, "parallel.layout=allgather"),
    one("heads in another order", "ring/layouts/ulysses.py", "[x.unflatten(0, (self.heads.ranks, -1)) for x in",
        "[x.unflatten(0, (self.heads.ranks, -1)).flip(0) for x in", "log-probabilities", RING,
        "parallel.layout=ulysses"),
    one("a head of keys that went to two", "ring/layouts/ulysses.py", "self.heads.copies)).sum(2)",
        "self.heads.copies))[:, :, 0]", "gradient", RING, "parallel=ring4", "parallel.layout=ulysses"),
    one("the outer ring's neighbour", "ring/groups.py", "range(rank % size, ring_size, size)",
        "range((rank + 1) % size, ring_size, size)", "log-probabilities", RING, "parallel=ring4",
        "parallel.layout=hybrid", "parallel.ulysses_size=2"),
)  # fmt: skip

MODEL_FAULTS = (
    one("positions are not handed over", "model/policy.py", "position_ids=shard.positions_t.unsqueeze(0)",
        "position_ids=None", "log-probabilities", MODEL),
    one("positions off by one in the model", "model/policy.py", "position_ids=shard.positions_t.unsqueeze(0)",
        "position_ids=shard.positions_t.unsqueeze(0) * 2", "log-probabilities", MODEL),
    one("float32 in the softmax", "model/policy.py", "norm_n = logits_nV.logsumexp(-1)",
        "norm_n = (logits_nV.logsumexp(-1) * 2**26).round() / 2**26", "log-probabilities", MODEL),
    one("log-probability of the token itself", "model/policy.py", "hidden_tE[piece], shard.targets_t[piece])",
        "hidden_tE[piece], shard.tokens_t[piece])", "log-probabilities", MODEL),
    one("the head does not hand its gradient down", "model/policy.py", "hidden_tE[piece], shard.targets_t[piece])",
        "hidden_tE[piece] * 0.5 + hidden_tE[piece].detach() * 0.5, shard.targets_t[piece])", "gradient", MODEL),
    one("mean logits", "model/policy.py", "logits_nV.detach().mean(-1)", "logits_nV.detach().amax(-1)", "metrics",
        MODEL),
    one("nothing is frozen", "model/policy.py", "                if name in found:", "                if not found:",
        "gradient", MODEL, "model.freeze=[*layers.0.*]"),
    one("the model's own scale", "model/hook.py", "scale = query.shape[-1] ** -0.5 if scaling is None else scaling",
        "scale = query.shape[-1] ** -0.5 * 1.01", "log-probabilities", MODEL),
    one("random weights by another seed", "model/loading.py", "torch.manual_seed(cfg.seed)",
        "torch.manual_seed(cfg.seed + 1)", "log-probabilities", MODEL),
    one("the log-probabilities of the padding", "model/policy.py", "values_n * weight_n.to(values_n.dtype)",
        "values_n * weight_n.to(values_n.dtype) * 0.999", "log-probabilities", MODEL),
)  # fmt: skip

ALGOS_FAULTS = (
    one("beta is forgotten", "algos/dpo.py", "logit_P = self.beta * margin_P", "logit_P = margin_P", "loss", ALGOS,
        step=1),
    one("label smoothing with the wrong sign", "algos/dpo.py", "- smoothing * F.logsigmoid(-logit_P)",
        "+ smoothing * F.logsigmoid(-logit_P)", "loss", ALGOS, "loss.label_smoothing=0.1", step=1),
    one("label smoothing on the right label", "algos/dpo.py", "- smoothing * F.logsigmoid(-logit_P)",
        "- smoothing * F.logsigmoid(logit_P)", "loss", ALGOS, "loss.label_smoothing=0.1", step=1),
    one("the rejected answer is added", "algos/dpo.py", "- (policy.rejected_P", "+ (policy.rejected_P", "loss", ALGOS),
    one("no reference in the margin", "algos/dpo.py", "(policy.chosen_P - reference.chosen_P)", "policy.chosen_P",
        "loss",
        ALGOS),
    one("rewards without beta", "algos/rewards.py", "chosen_P = beta * (policy.chosen_P", "chosen_P = (policy.chosen_P",
        "metrics", ALGOS),
    one("a tie counts as lost", "algos/rewards.py", "<= band_P, 0.5, (margins_P", "<= band_P, 0.0, (margins_P",
        "metrics",
        ALGOS),
    one("the margin of the logged rewards", "algos/rewards.py", '"rewards/margins": chosen_P - rejected_P',
        '"rewards/margins": chosen_P + rejected_P', "metrics", ALGOS),
)  # fmt: skip

TRAIN_FAULTS = (
    one("the world is not in the scale", "train/step.py", "(run.world.size / count)", "(1 / count)", "loss", TRAIN),
    one("divided by the accumulation again", "train/step.py", "(run.world.size / count)",
        "(run.world.size / count / len(micro_batches))", "loss", TRAIN),
    one("mean of means", "train/step.py", "replica_loss_sum = losses_P.sum()", "replica_loss_sum = losses_P.mean()",
        "loss", TRAIN),
    one("divided by the whole batch", "train/step.py", "count = len(batch.indices)", "count = run.cfg.train.batch_size",
        "loss", TRAIN, *SHORT_BATCH, step=2),
    one("every micro-batch is the last", "train/step.py", "last=number == len(micro_batches)", "last=True", "loss",
        TRAIN),
    one("the last micro-batch is left out", "train/step.py",
        "train.micro_batch_size)\n    for number",
        "train.micro_batch_size)[:-1]\n    for number", "data", TRAIN),
    one("a replica takes the other's pairs", "train/step.py", "micro_batches = batch.micro_batches(run.world.replica,",
        "micro_batches = batch.micro_batches(0,", "data", TRAIN),
    one("an empty replica adds", "train/step.py", "return result.losses_P + 0.0 * tokens.logps_t.sum() if pairs == 0",
        "return result.losses_P.new_ones(1) + 0.0 * tokens.logps_t.sum() if pairs == 0", "loss", TRAIN, *EMPTY_REPLICA,
        step=2),
    Fault("sums in float32", "train/step.py",
          (("dtype=torch.float64, device=values_t.device", "dtype=torch.float32, device=values_t.device"),
           ("values_t.double())[:-1]", "values_t.float())[:-1].double()")), "log-probabilities", TRAIN),
    one("the sides of a pair swapped", "train/step.py", "PairLogps(values_S[0::2], values_S[1::2])",
        "PairLogps(values_S[1::2], values_S[0::2])", "log-probabilities", TRAIN),
    one("the policy is its own reference", "train/step.py", "reference_t = run.reference(shard).logps_t",
        "reference_t = tokens.logps_t.detach()", "log-probabilities", TRAIN),
    one("the reference learns", "train/build.py",
        "reference = build_reference(cfg, lambda: build_policy(cfg, model_config, device), dtype, world)",
        "reference = torch.no_grad()(lambda shard: policy(shard))", "log-probabilities", TRAIN, step=2),
    one("the reference in float32", "train/build.py", "cast_parameters(starting, dtype)",
        "cast_parameters(starting, torch.bfloat16); cast_parameters(starting, dtype)", "log-probabilities", TRAIN),
    one("warm-up off by one", "train/schedule.py", "self.lr * step / (self.warmup_steps + 1)",
        "self.lr * step / self.warmup_steps", "optimizer", TRAIN),
    one("decay off by one", "train/schedule.py", "done = (step - 1 - self.warmup_steps) / span",
        "done = (step - self.warmup_steps) / span", "optimizer", TRAIN, "optim.warmup_steps=0"),
    one("the next step's rate", "train/step.py", "lr = run.schedule.at(batch.step)",
        "lr = run.schedule.at(batch.step + 1)",
        "optimizer", TRAIN),
    one("tokens of one rank of the ring", "train/step.py", '"tokens", shard.real_tokens, SHARDED',
        '"tokens", shard.real_tokens, REPLICATED', "metrics", TRAIN),
    one("logits per pair", "train/step.py", "logits.chosen_P.sum(), trained.chosen_P.sum(), SHARDED",
        "logits.chosen_P.sum(), float(len(trained.chosen_P)), SHARDED", "metrics", TRAIN),
    one("loss of rank 0", "train/step.py", "values = meter.reduce()",
        "values = meter.reduce(); "
        "values['loss'] = float(meter._sums['loss']) / max(1.0, float(meter._counts['loss']))", "metrics", TRAIN),
    one("epochs as whole numbers", "train/step.py", '"epoch": batch.step / run.steps_per_epoch',
        '"epoch": float(batch.epoch)', "metrics", TRAIN),
    one("total tokens start anew", "train/loop.py", "position.total_tokens + int(values", "int(values", "metrics",
        TRAIN,
        step=2),
    one("held-out pairs twice", "train/step.py", "tuple(range(first, min(first + size, len(run.eval_pairs))))",
        "tuple(range(max(0, len(run.eval_pairs) - size), len(run.eval_pairs)))", "metrics", TRAIN, "data.eval_size=13",
        "train.eval_every=1"),
)  # fmt: skip

ENGINE_FAULTS = (
    one("summed, not averaged", "engine/plain.py", "            flat /= self.world.size", "            pass",
        "gradient",
        ENGINE),
    one("reduced over the ring only", "engine/plain.py", "            dist.all_reduce(flat)",
        "            dist.all_reduce(flat, group=self.world.ring.group)", "gradient", ENGINE),
    one("not reduced", "engine/plain.py", "            if self.world.size > 1:", "            if self.world.size > 99:",
        "gradient", ENGINE),
    one("gradients are not zeroed", "engine/plain.py", "        self.optimizer.zero_grad(set_to_none=True)",
        "        pass",
        "gradient", ENGINE, step=2),
    one("the last micro-batch's gradient only", "engine/plain.py", "        loss.backward()\n",
        "        self.optimizer.zero_grad()\n        loss.backward()\n", "gradient", ENGINE),
    one("a parameter is left out of the reduction", "engine/plain.py",
        "_buckets([m.grad for m in self.masters.values() if m.grad is not None])",
        "_buckets([m.grad for m in list(self.masters.values())[1:] if m.grad is not None])", "gradient", ENGINE),
    one("reduced in float32", "engine/plain.py", "torch.cat([grad.reshape(-1) for grad in bucket])",
        "torch.cat([grad.reshape(-1) for grad in bucket]).float()", "gradient", ENGINE),
    one("the norm before the reduction", "engine/plain.py",
        "            if self.world.size > 1:\n                self._reduce()\n            self._measure()",
        "            self._measure()\n            if self.world.size > 1:\n                self._reduce()", "optimizer",
        ENGINE),
    one("not clipped", "engine/plain.py", "if clip > 1 and master.grad", "if clip > 1e9 and master.grad", "optimizer",
        ENGINE),
    one("clipped parameter by parameter", "engine/plain.py", "                master.grad /= clip",
        "                master.grad /= max(1.0, float(master.grad.norm()) / self.max_grad_norm)", "optimizer", ENGINE),
    one("another rate", "engine/plain.py", "        set_lr(self.optimizer, lr)",
        "        set_lr(self.optimizer, lr * 1.01)",
        "optimizer", ENGINE),
    one("gains decay too", "engine/base.py", "len(shape_of(parameter)) > 1 else 0.0",
        "len(shape_of(parameter)) > 0 else 0.0", "optimizer", ENGINE),
    one("nothing decays", "engine/base.py", "decay = weight_decay if", "decay = 0.0 if", "optimizer", ENGINE),
    one("other betas", "engine/base.py", "betas = (optim.betas[0], optim.betas[1])", "betas = (optim.betas[0], 0.99)",
        "optimizer", ENGINE, step=2),
    one("another eps", "engine/base.py", "eps=optim.eps", "eps=1e-7", "optimizer", ENGINE),
    one("Adam for descent", "engine/base.py", "if optim.name is OptimName.sgd:", "if optim.name is None:", "optimizer",
        ENGINE, "optim=sgd", "optim.lr=0.05"),
    one("float32 parameters", "engine/plain.py", "torch.float64 if dtype is torch.float64 else torch.float32",
        "torch.float32", "log-probabilities", ENGINE),
    one("the norm of one rank's pieces", "engine/fsdp2.py", "        dist.all_reduce(total)", "        pass",
        "optimizer",
        ENGINE, "engine=fsdp2"),
    one("FSDP2 does not accumulate", "engine/fsdp2.py", "        loss.backward()\n",
        "        self.optimizer.zero_grad()\n        loss.backward()\n", "gradient", ENGINE, "engine=fsdp2"),
)  # fmt: skip

METRICS_FAULTS = (
    one("replicated sums counted on every rank", "metrics/meter.py",
        "if spread is REPLICATED and self.world.ring.rank != 0:",
        "if spread is REPLICATED and self.world.ring.rank != 0 and where is self._counts:", "metrics", METRICS),
    one("mean over the ranks", "metrics/meter.py", "sums = gathered[:, 1 : 1 + len(self._sums)].sum(0)",
        "sums = gathered[:, 1 : 1 + len(self._sums)].mean(0)", "metrics", METRICS),
    one("the last micro-batch's values", "metrics/meter.py",
        "where[name] = where[name] + value if name in where else value",
        "where[name] = value", "metrics", METRICS),
    one("rank 0's values", "metrics/meter.py", "        gathered = _gather(mine, self.world)",
        "        gathered = _gather(mine, self.world)[:1]", "metrics", METRICS),
)  # fmt: skip

OWN_FAULTS = (
    one("ZeRO-1 doubles the gradient", "engine/zero.py", "engine.backward(loss, scale_wrt_gas=False)",
        "engine.backward(loss * 2, scale_wrt_gas=False)", "gradient", ENGINE, base=BASE),
    one("ZeRO-1 steps by another rate", "engine/zero.py", "set_lr(self.engine.optimizer, lr)",
        "set_lr(self.engine.optimizer, lr * 1.05)", "optimizer", ENGINE, base=BASE),
    one("ZeRO-1 does not accumulate", "engine/zero.py", "set_gradient_accumulation_boundary(last)",
        "set_gradient_accumulation_boundary(True)", "gradient", ENGINE, base=BASE),
    one("ZeRO-1 is wrong from its second step on", "engine/zero.py", "engine.backward(loss, scale_wrt_gas=False)",
        "engine.backward(loss * (1.001 if engine.global_steps else 1.0), scale_wrt_gas=False)", "gradient", ENGINE,
        step=2, base=BASE),
    one("ZeRO-2 keeps the last micro-batch", "engine/zero.py",
        "        _backward(self.engine, loss, last)\n\n    def step",
        "        _backward(self.engine, loss if last else loss * 0.0, last)\n\n    def step", "gradient", ENGINE,
        "engine=zero2", base=BASE),
    one("DeepSpeed's own clipping", "engine/zero.py", '"gradient_clipping": max_grad_norm,',
        '"gradient_clipping": 0.1,',
        "optimizer", ENGINE, "optim=sgd", "optim.lr=0.05", base=BASE),
    one("masters from bfloat16", "engine/zero.py", "                fragment.weight.copy_(exact(fragment))",
        "                pass", "log-probabilities", ENGINE, "train.precision=bf16", base=BASE),
    one("bfloat16 copies are not renewed", "engine/plain.py",
        "                parameter.data.copy_(self.masters[name].data)",
        "                pass", "log-probabilities", ENGINE, "train.precision=bf16", "engine=torch", base=BASE),
    one("bfloat16 gradients added up in bfloat16", "engine/plain.py", "else master.grad.add_(low.grad)",
        "else (master.grad + low.grad).bfloat16().float()", "gradient", ENGINE, "train.precision=bf16",
        "engine=torch",
        base=BASE),
    one("ZeRO-3's reference is another", "train/build.py", "forward = zero.frozen(cfg.engine, starting, dtype)",
        "forward = zero.frozen(cfg.engine, starting, torch.bfloat16)", "log-probabilities", ENGINE, "engine=zero3",
        base=BASE),
)  # fmt: skip

FAULTS = (*DATA_FAULTS, *RING_FAULTS, *MODEL_FAULTS, *ALGOS_FAULTS, *TRAIN_FAULTS, *ENGINE_FAULTS, *METRICS_FAULTS,
          *OWN_FAULTS)  # fmt: skip

"""Changes that are active and that nothing has to find, and why.

By the file below rlexp/, the line of the source, and the text before and after.
"""

from __future__ import annotations

from collections.abc import Mapping

AUTOGRAD = "autograd casts a gradient to the dtype of its input"
BYTES = "memory alone"
FROZEN = f"{BYTES}: a frozen model casts what it is given"
SPEED = "time alone"
HERE = "on CPU it is there"

KNOWN: Mapping[tuple[str, str, str, str], str] = {
    ("training/algos/log_ratios.py",
     "return torch.where(margins_P.abs() <= band_P, 0.5, (margins_P > 0).to(margins_P.dtype))",
     "margins_P > 0", "margins_P >= 0"): "a margin of 0 is a tie",
    ("launch/local.py", "inbox, outbox = context.Pipe(duplex=False)", "False", "True"):
        "a pipe of both directions has this one too",
    ("launch/local.py", "os._exit(1)", "1", "2"): "the report that went before says how it ended",
    ("launch/local.py", "rank.process.close()", "rank.process.close()", "pass"): f"{BYTES}: of a process that is gone",
    ("launch/run_folder.py", "return os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)", "os.O_CREAT | os.O_RDWR",
     "os.O_CREAT"): "only a disk of the network locks nothing that it may not write",
    ("launch/staged.py", "return True", "True", "False"): "torch passes on what a collective's wait returns to nobody",
    ("training/dealer/deal.py", "if tokens >= AT_ONCE or place + 1 == count:", "tokens >= AT_ONCE",
     "tokens > AT_ONCE"): f"{BYTES}: a part that is one unit longer",
    ("training/checkpoint/keeper.py", "if self._world.rank == 0 and self._cfg.keep_best:",
     "self._world.rank == 0 and self._cfg.keep_best", "self._cfg.keep_best"): "the other ranks take what rank 0 read",
    ("training/dataset/seam.py", 'if not getattr(self.tokenizer, "is_fast", False):', "False", "True"):
        "every tokenizer of transformers says whether it is",
    **dict.fromkeys((
        ("training/dataset/store.py", '"ends": np.cumsum([len(part) for part in parts], dtype=np.int64),',
         "np.cumsum([len(part) for part in parts], dtype=np.int64)", "np.cumsum([len(part) for part in parts])"),
        ("training/dataset/store.py",
         '"rows": np.array([place for file, row, _ in kept for place in (file, row)], dtype=np.int64),',
         "np.array([place for file, row, _ in kept for place in (file, row)], dtype=np.int64)",
         "np.array([place for file, row, _ in kept for place in (file, row)])"),
        ("training/dataset/store.py", '"extra_ends": np.cumsum([len(extra) for extra in extras], dtype=np.int64),',
         "np.cumsum([len(extra) for extra in extras], dtype=np.int64)", "np.cumsum([len(extra) for extra in extras])"),
    ), "of an empty block alone, of which nothing is written"),
    ("training/dataset/store_making.py", "after += 1", "1", "2"): f"{SPEED}: how far it looks for further mistakes",
    ("training/dataset/synthetic.py",
     '_pair(random_, f"synthetic {split} pair {number}", words, margins.randint(1, 8) / 4) for number in range(size)',
     "margins.randint(1, 8) / 4", "margins.randint(1, 8)"): "any margins do for rows that are made up",
    ("training/dataset/tokens.py", "if len(prompt) <= longest or bos_id is None or prompt[0] != bos_id:",
     "len(prompt) <= longest", "len(prompt) < longest"): "a prompt of just that length stays whole on both ways",
    ("data/draw.py", "bars, edge = sparkline(each, max(8, width - room - 24))", "width - room", "width + room"):
        "how wide a graph is; a line is cut at the terminal's edge",
    ("data/draw.py",
     "grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)",
     "False", "True"): "white space at the edge of a table",
    ("data/draw.py", 'grid.add_column("", no_wrap=True)', "True", "False"): "a mark is one letter",
    ("data/draw.py", 'grid.add_row(*mark, *(Text(row[place]) for place in kept), style="bold" if number == '
     'table.strong else "")', "number == table.strong", "number != table.strong"): "a mark says it too",
    ("data/lengths.py", "for power in range(19)", "19", "20"): "no length has so many digits",
    ("data/rings.py", "samples, tokens = samples + len(batch.indices), tokens + size", "samples + len(batch.indices)",
     "samples - len(batch.indices)"): f"{SPEED}: how many steps are looked at",
    ("data/sharing.py", "return numbers ^ (numbers >> np.uint64(31))", "31", "32"): "it scrambles as well",
    ("eval/__main__.py", "sys.stdout.flush()", "sys.stdout.flush()", "pass"): f"{SPEED}: when its head is seen",
    ("generate/rank.py", "placing = placing_for(cfg, self.device, self.world, frozen=True)", "True", "False"): FROZEN,
    ("generate/rank.py", "drawn: list[Sample] = [sample for samples in drawer.draw(parts, 0) for sample in samples]",
     "0", "1"): "any number does for the only rollout",
    ("training/checkpoint/keeper.py", "for _ in range(2):  # a second try, since it is the last chance", "2", "3"):
        "what fails twice fails again",
    ("training/reference/stored.py", "ends = np.cumsum([len(each) for each in arrays], dtype=np.int64)",
     "np.cumsum([len(each) for each in arrays], dtype=np.int64)", "np.cumsum([len(each) for each in arrays])"):
        "of no sequences alone, of which nothing is written",
    ("training/reference/stored.py", "line = json.dumps(said, sort_keys=True).encode()", "True", "False"):
        "whoever reads the line reads it by names",
    ("training/reference/stored.py", "line = file.readline(1 << 20)", "20", "21"): "both are far more than a line has",
    ("training/sinks/baseline.py", "return False", "False", "True"): f"{SPEED}: the file is read anew",
    ("training/sinks/console.py", "self.said = 0.0  # when a line said how far a step is", "0.0", "1.0"):
        "both are long ago",
    ("compare/comparison.py",
     "return np.asarray(np.repeat(sums / np.diff(bounds), np.diff(bounds)), dtype=np.float64)",
     "np.float64", "np.float32"): "it only chooses which points are drawn",
    ("compare/picture.py", 'below.annotate("0: equal to the bit", (0.01, 0.075), xycoords="axes fraction", fontsize=7, '
     'color="#666666")', "0.075", "1.075"): "where a text stands in a picture",
    ("eval/report.py", 'place.write_text(json.dumps(said, indent=1) + "\\n", encoding="utf-8")', "1", "2"):
        "white space of a file",
    ("preflight/rehearsal/device.py", "return [torch.bfloat16, torch.float16]", "torch.bfloat16", "torch.float32"):
        "nothing that is rehearsed asks for autocast",
    ("preflight/rehearsal/device.py",
     'library.impl("_copy_from", lambda _source, there, _non_blocking=False: there, "PrivateUse1")', "False", "True"):
        "nothing reads it",
    ("preflight/rehearsal/layers.py", "few += self.period * (1 if tries < ONE_BY_ONE else 2**tries)",
     "tries < ONE_BY_ONE", "tries <= ONE_BY_ONE"): f"{SPEED}: how many layers are tried next",
    ("preflight/rehearsal/log.py",
     "highest = int(np.argmax(np.concatenate(([0], np.cumsum(run.sizes))))) if len(run.sizes) else 0", "0", "1"):
        "no storage is as small as a byte",
    ("preflight/rehearsal/longest_samples.py",
     "host=lambda world: Host(world.size, dist.group.WORLD if world.size > 1 else None),", "1", "2"):
        "a rehearsal waits for nobody",
    ("run_files/checkpoint_folder.py", "shutil.rmtree(doomed, ignore_errors=True)", "True", "False"):
        "whoever asks for it leaves such errors alone",
    ("run_files/curve_distance.py", "return np.asarray(size * np.maximum(1.0, steps / 10), dtype=np.float64)",
     "np.float64", "np.float32"): "it is an estimate",
    ("run_files/metrics_jsonl.py", 'files.write_bytes(path, b"".join(lines), durable=True)', "True", "False"):
        "only a machine that loses its power tells",
    ("run_files/rollouts_jsonl.py",
     "common, mine, theirs = np.intersect1d(self.rollouts, other.rollouts, assume_unique=True, return_indices=True)",
     "True", "False"): SPEED,
    **dict.fromkeys((
        ("status/draw.py", 'Column("time left", lambda row: time_of(row.seconds_left), 2),', "2", "3"),
        ("status/draw.py", 'Column("Slurm\'s limit", lambda row: time_of(limit(row)), 6),', "6", "7"),
    ), "which column a narrow terminal leaves out first"),
    ("training/sinks/wandb_read.py", "if any(mark in line[:80] for mark in marks):", "80", "81"):
        "a mark stands at the beginning of its line",
    ("training/metrics/live_tensors.py", "self._made = 0", "0", "1"): "a number only tells storages apart",
    ("training/metrics/live_tensors.py", "if self.live > self.peak:", "self.live > self.peak",
     "self.live >= self.peak"): "a peak that is reached again is the same",
    ("training/metrics/meter.py", "gathered = _gather(mine.to(self.device), self.world)", "mine.to(self.device)",
     "mine"): HERE,
    ("training/ring/attention.py",
     "return *(grad.to(dtype) for grad, dtype in zip(dqkv, ctx.dtypes, strict=True)), None, None",
     "grad.to(dtype)", "grad"): AUTOGRAD,
    ("training/ring/collectives.py", "received = torch.empty_like(buffer[0])", "0", "1"):
        "all entries have one shape",
    ("training/ring/kernels/cpu_flash.py",
     "widest = KEYS if seen is None else min(KEYS, max(NARROW, (window or keys) // 8))",
     "(window or keys) // 8", "window or keys"): f"{SPEED}: how wide strips are",
    ("training/ring/kernels/own_operators.py",
     'torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)',
     "torch.library.register_fake(f'{NAMESPACE}::{name}', shapes, lib=library)", "pass"):
        "planted after the process has its operators; written into the file, `test_fused.py` finds it",
    ("training/ring/transports/heads.py", "if copies > 1:  # heads and ranks do not nest: few models", "copies > 1",
     "copies >= 1"): "one copy is what is there",
    ("training/train/build.py", "return Placing(device, dtype if frozen else steps, part, whole=False)",
     "False", "True"): f"{BYTES}: FSDP2 takes its piece of the whole",
    ("training/train/build.py", "return placing_for(cfg, run.device, run.world, frozen=True), None",
     "True", "False"): FROZEN,
    ("training/train/build.py", 'placing = placing_for(cfg, torch.device("cpu"), run.world, frozen=True)',
     "True", "False"): FROZEN,
    ("training/train/build.py",
     "policy = build_policy(cfg, model[1], run.device, replace(needs.frozen, reference=False), placing, sources)",
     "False", "True"): "a model of its own is only built where the reference is not the adapter's start",
    ("training/train/by_length.py",
     "here_E = moved(torch.from_numpy(places == number), one_E.device).to(one_E.dtype)",
     "moved(torch.from_numpy(places == number), one_E.device).to(one_E.dtype)",
     "moved(torch.from_numpy(places == number), one_E.device)"): "truth values multiply and add up to the same",
    ("training/train/resume.py", "known = run_folder.read(run_dir) if run.world.rank == 0 else {}",
     "run.world.rank == 0", "run.world.rank != 0"): "the identity is then computed again, and is the same",
    ("training/engine/rehearsed.py", "return False", "False", "True"): "a rehearsal has no work to wait for",
    ("training/train/rollout_task.py", "return HeldSamples(shard.to(run.device), there)", "shard.to(run.device)",
     "shard"): HERE,
    ("training/train/rollout_task.py", '"length_S": torch.tensor(lengths, dtype=dtype),',
     "torch.tensor(lengths, dtype=dtype)", "torch.tensor(lengths)"): "a whole number divides like a float",
    ("training/engine/frozen.py", "policy.eval().requires_grad_(False)", "False", "True"):
        "its passes have no gradient",
    ("training/engine/fsdp2.py", "self.optimizer.zero_grad(set_to_none=True)", "True", "False"):
        f"{BYTES}: gradients add up from zeros",
    ("training/engine/streamed.py", "self.copies.follow([*(part for _, part in parts), last])",
     "self.copies.follow([*(part for _, part in parts), last])", "pass"): f"{SPEED}: what is copied ahead",
    ("training/engine/streamed.py",
     "elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):",
     "parameter.ndim > 1", "parameter.ndim >= 1"): f"{BYTES}: vectors are streamed too",
    ("training/engine/streamed.py",
     "elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):", "1", "2"):
        f"{BYTES}: matrices outside layers are not streamed",
    ("training/engine/zero.py", 'DeepSpeedZeroConfig(**ds_config(cfg, 0.0, torch.float32)["zero_optimization"])',
     "torch.float32", "torch.bfloat16"): "the part of the configuration that is checked has no dtype",
    ("training/engine/zero.py", 'if not all(hasattr(parameter, "ds_id") for parameter in policy.parameters()):',
     "not all((hasattr(parameter, 'ds_id') for parameter in policy.parameters()))",
     "all((hasattr(parameter, 'ds_id') for parameter in policy.parameters()))"):
        f"{BYTES}: DeepSpeed partitions a whole model later",
    ("training/engine/zero.py",
     "import_deepspeed().init_distributed(dist_init_required=False, verbose=False)",
     "False", "True"): "what DeepSpeed prints",
    ("training/engine/zero.py", '"stage3_max_live_parameters": 3 * layer,', "3 * layer", "3"): SPEED,
    ("training/engine/zero.py", "moments = list(made[0]) if made else []", "0", "1"):
        "both groups name their moments alike; `make check` saves runs with one group",
    ("training/model/adapter.py", "config.inference_mode, config.lora_dropout = False, 0.0", "False", "True"):
        "what is trained is set afterwards, and files always have true",
    ("training/model/head.py",
     "return LOGITS if memory is None else max(LOGITS, memory // share // each)",
     "max(LOGITS, memory // share // each)", "min(LOGITS, memory // share // each)"): SPEED,
    ("training/model/head.py",
     "return torch.zeros_like(self.weight) if self.total is None else self.total.to(self.weight.dtype)",
     "self.total.to(self.weight.dtype)", "self.total"): AUTOGRAD,
    ("training/model/policy.py",
     "input_ids=batch.tokens_Bq, position_ids=batch.positions_Bq, use_cache=False, decoding=batch",
     "False", "True"): f"{BYTES}: a cache that nothing reads",
    ("training/rollout/deal.py",
     "hand = hands[seat if lap % 2 == 0 else ranks - 1 - seat]  # forth and back, to even out the lengths", "2", "3"):
        f"{SPEED}: who draws what",
    ("training/rollout/noise.py", "return (bits >> np.uint64(64 - _BITS)) * np.float64(2.0**-_BITS)",
     "np.float64", "np.float32"): "numpy multiplies whole numbers of 64 bits in float64",
    ("training/rollout/sampling.py", "np.asarray(drawn.logps[row], dtype=self._dtype),",
     "np.asarray(drawn.logps[row], dtype=self._dtype)", "np.asarray(drawn.logps[row])"):
        f"{BYTES}: the same values",
}  # fmt: skip

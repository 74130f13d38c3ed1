"""The keys of DeepSpeed that `engine.overrides` may set, and the reason why others may not.

DeepSpeed ignores unknown keys, and some known keys break the training contract silently. So every key that may be set
is listed here. `tests/config/test_config.py` compares the list with DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlexp.base.errors import ConfigError
from rlexp.config.schema.keys import suggestion

# Keys that may not be set, by the reason.
_REASONS = {
    "train.batch_size and train.micro_batch_size set it, and the boundary of a step is set by the training loop": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "managed_gradient_accumulation", "elasticity"),
    "the keys optim.* set it; left unset, DeepSpeed would clip at 1.0": (
        "gradient_clipping", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
    "train.precision sets it": ("fp16", "bf16", "bfloat16", "amp", "torch_autocast"),
    "the scale of the gradient is the contract of rlexp/training/engine/base.py": (
        "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    "it sends or keeps rounded values, so the curve would move with the number of ranks": (
        "weight_quantization", "compression_training", "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zero_quantized_gradients"),
    "kernels would run that neither the probe nor the tests have seen": ("compile",),
    "each rank would see other data than the sampler's, or gradients would not be averaged over all ranks": (
        "use_data_before_expert_parallelism", "mesh_param", "mpu", "sequence_parallel_size",
        "data_parallel_size", "tensor_parallel", "autotp_size", "pipeline", "data_efficiency",
        "curriculum_learning", "data_sampling"),
    "gradients are added up in float32": ("data_types",),
    "gradients of single parameters could not be read and verified": ("zero_optimization.round_robin_gradients",),
    "the gradient and its norm would be reduced in different ways": ("sparse_gradients",),
    "layers would be left out at random": ("progressive_layer_drop",),
    "parameters would not be cut over all ranks, and a checkpoint could not be read on another layout": (
        "hybrid_engine", "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather"),
    "the keys checkpoint.* set it": ("checkpoint",),
    "engine=zero0|zero1|zero2|zero3 and engine.offload set it": (
        "zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
        "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
    "it updates some parameters later than others": ("zero_optimization.zenflow",),
    "clipping and the metrics need the norm": ("zero_optimization.compute_grad_norm",),
    "DeepSpeed has removed it": ("zero_optimization.legacy_stage1",),
}  # fmt: skip
REFUSED = {key: why for why, keys in _REASONS.items() for key in keys}

PASSED = {
    "communication_data_type", "seq_parallel_communication_data_type", "steps_per_print", "wall_clock_breakdown",
    "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "disable_allgather", "disable_python_gc", "aio",
    "zero_force_ds_cpu_optimizer", "activation_checkpointing", "timers",
}  # fmt: skip

PASSED_ZERO = {
    *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "sub_group_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters"),
    *("memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks", "cpu_offload_use_pin_memory"),
    *("parameter_alignment", "leaf_module", "override_module_apply", "save_muon_momentum_buffer_in_memory"),
    # These concern DeepSpeed's own checkpoints, which are never written: they have no effect.
    *("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
}


def check_overrides(overrides: Mapping[str, Any]) -> None:
    allowed = [*PASSED, *(f"zero_optimization.{key}" for key in PASSED_ZERO)]
    leaves, inside = dict(overrides), overrides.get("zero_optimization")
    if isinstance(inside, Mapping):
        del leaves["zero_optimization"]
        leaves |= {f"zero_optimization.{key}": value for key, value in inside.items()}
    for key, value in leaves.items():
        named = f"engine.overrides.{key}={value}"
        if key == "communication_data_type" and value not in ("fp32", "bf16"):
            raise ConfigError(f"{named}: must be fp32 or bf16. Use fp32 (exact), or bf16 (half the bytes).")
        if key in REFUSED:
            raise ConfigError(f"{named}: may not be set here: {REFUSED[key]}. Leave it out.")
        if key not in allowed:
            near = suggestion(key, [*allowed, *REFUSED])
            raise ConfigError(f"{named}: is not a DeepSpeed key that can be passed on.{near} Leave it out.")

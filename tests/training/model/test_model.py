"""transformers models over the ring: log-probabilities, the probe, pinned rotary angles, float64 throughout."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlexp.base.errors import ModelError
from rlexp.config.checks.layout import windows_in
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import HFModelConfig, OptimConfig, TinyModelConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.engine.plain import PlainEngine
from rlexp.training.model import rope
from rlexp.training.model.float64 import StayFloat64
from rlexp.training.model.head import logits_at_once
from rlexp.training.model.hook import NAME, attention
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.model.policy import Policy, cast_parameters
from rlexp.training.model.probe import probe, probe_decoding
from rlexp.training.model.small import first_layers, small_config
from rlexp.training.ring.base import RingBatch
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.train.build import build_policy
from rlexp.training.train.surroundings import Unprobed
from rlexp.training.types import Wanted
from rlexp.training.world.groups import ALONE, World, build_world
from tests.conftest import ROOT
from tests.helpers import warm
from tests.helpers.models import HOW, LARGE
from tests.helpers.ranks import on_ranks, seeded

ZIGZAG = get_layout("zigzag")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 300, "head_dim": 8}  # fmt: skip

WORK: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama with dynamic rope": LlamaConfig(
        **SMALL, max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen3": Qwen3Config(**SMALL),
    "mistral with a wide window": MistralConfig(**SMALL, sliding_window=4096),
    "mistral with a narrow window": MistralConfig(**SMALL, sliding_window=128),
    "gemma3, windows in some layers": Gemma3TextConfig(**SMALL, sliding_window=256),
    "olmo3, windows in some layers": Olmo3Config(**SMALL, sliding_window=256),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "glm4 moe": Glm4MoeConfig(**SMALL, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
WINDOWS: dict[str, tuple[PreTrainedConfig, tuple[int | None, ...]]] = {
    "mistral": (MistralConfig(**SMALL, sliding_window=128), (128,) * 6),
    "mistral with a wide window": (MistralConfig(**SMALL, sliding_window=512), (None,) * 6),
    "qwen2": (
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=128, max_window_layers=4),
        (None,) * 4 + (128,) * 2,
    ),
    "qwen2 that does not use its window": (Qwen2Config(**SMALL, sliding_window=128), (None,) * 6),
    "qwen3 with experts": (
        Qwen3MoeConfig(
            **SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            use_sliding_window=True,
            sliding_window=128,
            max_window_layers=4,
        ),
        (128,) * 6,
    ),
    "gemma3": (Gemma3TextConfig(**SMALL, sliding_window=128), (128,) * 5 + (None,)),
    "exaone4": (Exaone4Config(**SMALL, sliding_window=128, sliding_window_pattern=4), (128, 128, 128, None, 128, 128)),
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "gemma2": (Gemma2Config(**SMALL), "final_logit_softcapping=30.0; attn_logit_softcapping=50.0"),
    "sinks": (GptOssConfig(**SMALL, num_local_experts=4), "asks its attention for attention sinks"),
    "a window in the mask alone": (
        PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=64),
        "sliding_window=64 is shorter than data.max_length=512",
    ),
    "a model with sparse blocks": (
        MiniMaxM3VLTextConfig(**SMALL, num_local_experts=4, layer_types=["minimax_m3_sparse"] * 6),
        "asks its attention for block_indices",
    ),
    "mamba": (MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=300), "mamba"),
}


def probe_rank(spec: RankSpec, configs: Mapping[str, PreTrainedConfig]) -> dict[str, float]:
    ring = build_world(spec.world_size).ring
    return {name: probe(TinyModelConfig(), config, ring=ring, **HOW) for name, config in configs.items()}


def test_causal_decoders_work_without_being_named() -> None:
    for gaps in on_ranks(2, probe_rank, WORK):
        assert max(gaps.values()) < 1e-12, gaps


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_compute_is_refused_by_name(name: str) -> None:
    config, said = REFUSED[name]
    with pytest.raises(ModelError) as error:
        probe(TinyModelConfig(), config, ring=ALONE, **HOW)
    assert said in str(error.value)
    assert config.model_type in str(error.value)


def test_a_model_that_decodes_well_passes_the_probe_of_decoding() -> None:
    assert probe_decoding(TinyModelConfig(), load_config(TinyModelConfig(), 64), 64, torch.device("cpu")) < 1e-12


PROBED = """
import resource
from tests.helpers.models import HOW, LARGE
from rlexp.config.schema import TinyModelConfig
from rlexp.training.model.probe import probe
from rlexp.training.model.small import small_config
from rlexp.training.world.groups import ALONE
for name in ("llama 70b", "qwen3 235b-a22b", "glm 4.5"):
    assert probe(TinyModelConfig(), LARGE[name], ring=ALONE, **HOW) < 1e-12, name
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_the_probe_of_a_large_model_is_small() -> None:
    """70 and 235 billion parameters, in float64, with torch and transformers: below 2 GB. It takes 1 to 2 s of a core
    each, since the copies have few parameters."""
    answer = warm.run("-c", [PROBED], ROOT)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout.split()[-1]) < 2000


@pytest.mark.parametrize("name", LARGE)
def test_the_copy_keeps_what_the_probe_tests(name: str) -> None:
    config = LARGE[name]
    small = small_config(TinyModelConfig(), config, {})
    kinds = copy.deepcopy(config)
    kinds.num_hidden_layers = 6  # all that is different among its layers, in less time
    with torch.device("meta"):
        whole, model = (AutoModelForCausalLM.from_config(each) for each in (kinds, small))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok", "rope_parameters"):
        assert getattr(small, key, None) == getattr(config, key, None), key
    modules = {type(module) for module in model.modules()}
    assert modules == {type(module) for module in whole.modules()}
    if name == "falcon 180b":  # its heads would shrink with its width
        assert small.hidden_size == config.hidden_size
        assert small.num_hidden_layers == 2
        return
    assert parameters < 30e6
    assert small.num_hidden_layers == (4 if "glm" in name else 2)
    if "llama" not in name:
        mixture = model.model.layers[-1].mlp
        assert (mixture.experts.num_experts, mixture.gate.top_k) == (16, 8)


def test_a_layer_that_does_not_say_whether_it_is_causal_is() -> None:
    """The next thing that attention refuses is a mask."""
    none = torch.zeros(0)
    with pytest.raises(ModelError, match="makes its own attention mask"):
        attention(torch.nn.Module(), none, none, none, attention_mask=none, decoding=object())


def test_the_first_layers_keep_their_own_entries_of_every_list() -> None:
    config = LlamaConfig(**SMALL, kinds=["a", "b", "a", "b", "a", "b"], sizes=(1, 2, 3, 4, 5, 6), other=[1, 2])
    first = first_layers(config, 2)
    assert (first.num_hidden_layers, first.kinds, first.sizes, first.other) == (2, ["a", "b"], [1, 2], [1, 2])


def test_a_window_of_the_last_kind_of_layer_is_probed() -> None:
    """A copy reaches as far as the first layer of each kind, whether or not the configuration lists kinds."""
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 2
    config = Qwen3Config(**SMALL, layer_types=kinds, use_sliding_window=True, sliding_window=128)
    copy = small_config(TinyModelConfig(), config, {"sliding_window": 8})
    assert (copy.num_hidden_layers, copy.layer_types, copy.sliding_window) == (5, kinds[:5], 8)
    assert probe(TinyModelConfig(), config, ring=ALONE, **HOW) < 1e-12


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_ask_for_the_windows_that_the_description_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a layout and of a kernel reads them from config.json; a layer asks by itself, when it computes."""
    asked, attend = [], RingBatch.attend

    def noted(batch: RingBatch, *states: torch.Tensor | Ask) -> torch.Tensor:
        asked.append(states[-1].window)
        return attend(batch, *states)

    monkeypatch.setattr(RingBatch, "attend", noted)
    config, windows = WINDOWS[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    Policy(model)(shard_of([(5, 20), (3, 9)]))
    assert tuple(asked) == windows
    assert windows_in(config.to_dict(), 512) == windows


def test_a_refusal_is_on_all_ranks_and_ends_them() -> None:
    with pytest.raises(Exception, match=r"Gemma2Attention asks its attention for scores that are capped softly at 50"):
        on_ranks(2, probe_rank, {"gemma2": REFUSED["gemma2"][0]})


def refused_on_one_rank(spec: RankSpec) -> str:
    def out_of_range(*_: object) -> float:
        raise IndexError("out of range")

    with pytest.MonkeyPatch.context() as patch:
        if spec.rank == 1:
            patch.setattr("rlexp.training.model.probe._worst", out_of_range)
        with pytest.raises(ModelError) as refusal:
            probe_rank(spec, {"llama": WORK["llama"]})
    return str(refusal.value)


def test_a_pack_that_is_wrong_on_one_rank_is_refused_on_all() -> None:
    one, other = on_ranks(2, refused_on_one_rank)
    assert one == other
    assert "(RuntimeError: IndexError: out of range)" in one


def test_the_tiny_model_is_the_same_for_its_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        cfg = TinyModelConfig(seed=seed)
        return torch.cat([p.flatten() for p in load_model(cfg, load_config(cfg, 512), 512).parameters()])

    torch.manual_seed(1)
    one = weights(0)
    torch.manual_seed(2)
    assert torch.equal(one, weights(0))
    assert not torch.equal(one, weights(1))


def shard_of(lengths: list[tuple[int, int]]):
    sequences = [
        (torch.arange(3, 3 + p, dtype=torch.int32).numpy(), torch.arange(50, 50 + a, dtype=torch.int32).numpy())
        for p, a in lengths
    ]
    return shard_pack(pack_sequences(sequences, 1), ALONE, ZIGZAG, CpuFlash(), 512)


def test_a_shard_without_a_trained_token_touches_every_parameter() -> None:
    cfg = TinyModelConfig()
    model = load_model(cfg, load_config(cfg, 512), 512)
    shard = shard_pack(pack_sequences([], 4), ALONE, ZIGZAG, CpuFlash(), 512)
    tokens = Policy(model)(shard)
    assert len(tokens.logps_n) == 0
    tokens.logps_n.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any()


def test_transformers_makes_no_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look for packed sequences in the positions, and the host would wait for a GPU in every pass."""
    from transformers import masking_utils

    def looked(*_: object) -> None:
        raise AssertionError("transformers looks for packed sequences")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked)
    cfg = TinyModelConfig()
    tokens = Policy(load_model(cfg, load_config(cfg, 512), 512))(shard_of([(5, 20), (3, 9)]))
    assert len(tokens.logps_n) > 0


def test_float64_stays_float64_through_a_norm() -> None:
    """Without the mode a Llama norm computes in float32, and two layouts may round apart by 6e-8."""
    cfg = TinyModelConfig()
    norm = load_model(cfg, load_config(cfg, 512), 512).double().model.norm
    x = seeded(4, 64)
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.variance_epsilon)
    assert (norm(x) - expected).abs().max() > 1e-9
    with StayFloat64():
        assert (norm(x) - expected).abs().max() < 1e-14
        assert x.to(torch.bfloat16).float().dtype is torch.float32


def test_moving_rotary_angles_are_pinned_to_the_longest_sequence() -> None:
    """A short input is rotated as within a sequence of max_length if pinned, and otherwise not."""
    config = WORK["llama with dynamic rope"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    long, short = torch.arange(512).unsqueeze(0), torch.arange(40).unsqueeze(0)
    x = torch.zeros(1, 1, 64)
    cos_long, _ = model.model.rotary_emb(x, long)
    cos_before, _ = model.model.rotary_emb(x, short)
    assert not torch.allclose(cos_before, cos_long[:, :40])
    rope.pin(model, 512)
    cos_after, _ = model.model.rotary_emb(x, short)
    assert torch.equal(cos_after, cos_long[:, :40])


def test_buffers_keep_float32_when_parameters_are_cast() -> None:
    cfg = TinyModelConfig()
    model = load_model(cfg, load_config(cfg, 512), 512)
    cast_parameters(model, torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_noise_of_training_is_off() -> None:
    config = PhimoeConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.01, attention_dropout=0.1)
    path = Path(tempfile.mkdtemp())
    config.save_pretrained(path)
    loaded = load_config(HFModelConfig(path=str(path)), 512)
    assert (loaded.router_jitter_noise, loaded.attention_dropout) == (0.0, 0.0)


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    cfg = TinyModelConfig()
    model = load_model(cfg, load_config(cfg, 512), 512)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf = HFModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(hf, load_config(hf, 512), 512)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="no causal model can be loaded"):
        load_model(hf, load_config(hf, 512), 512)
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load_tokenizer(hf)


def test_experts_in_a_list_are_refused_where_gradients_are_reduced_as_they_come() -> None:
    """Such a model's gradients depend on the rank's tokens; transformers' own models keep experts in one tensor."""
    listed = nn.Module()
    listed.mlp = nn.Module()
    listed.mlp.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(ModelError, match=r"engine=zero2: Module keeps its experts in a list \(mlp.experts\)"):
        Policy(listed).refuse_listed_experts("zero2")
    dense = nn.ModuleList([nn.Linear(2, 2)])
    Policy(dense).refuse_listed_experts("zero2")
    for model, at_the_end in ((listed, True), (dense, False)):
        engine = PlainEngine(Policy(model), OptimConfig(lr=0.1), World(0, 1, ALONE), torch.float32)
        assert engine.reducing.at_the_end == at_the_end


def test_what_freezes_fits_something_and_leaves_something() -> None:
    small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy = Policy(small)
    policy.freeze(["0.*"])
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == ["1.weight", "1.bias"]
    with pytest.raises(ModelError, match=r"model.freeze: 'embedding' matches no parameter. Their names are like"):
        policy.freeze(["embedding"])
    with pytest.raises(ModelError, match="nothing is left to train"):
        policy.freeze(["1.*"])


def test_ranks_that_share_a_gpu_share_the_memory_for_logits() -> None:
    most = []
    for each in (1, 4):
        with assumed_gpus(1):
            cfg = compose_config(["logger=none", "data.size=8", f"launch.ranks_per_gpu={each}", "train.precision=fp32"])
        around = Unprobed()
        around.memory = lambda _: 80 << 30
        config = load_config(cfg.model, cfg.data.max_length)
        most.append(build_policy(cfg, config, torch.device("cpu"), Wanted(), None, around).logps.most)
    assert most[0] == 4 * most[1] == logits_at_once(80 << 30)

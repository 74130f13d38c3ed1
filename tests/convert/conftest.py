"""A folder with what the files of other trainers name: rows, rewards, adapters, models and files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REWARD = "def {}(prompts, answers, rows):\n    return [0.0] * len(answers)\n"
SETS = {
    "d": {"hf_hub_url": "org/d", "columns": None}, "d1": {"file_name": "d1.json"}, "d4": {}, "d5": 3,
    "d2": {"hf_hub_url": "org/e", "split": "val"}, "identity": {"file_name": "identity.json"},
    "d7": {"hf_hub_url": "org/d", "formatting": "sharegpt",
           "columns": {"prompt": "content", "response": "said", "kto_tag": "good", "history": "before"}},
    "d8": {"file_name": "d8.json", "columns": {"prompt": "ask", "query": "more"}},
    "dpo_en_demo": {"file_name": "dpo_en_demo.json", "columns": {"messages": "conversations"}},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json", "columns": {"prompt": "ask"}},
    "kto_en_demo": {"file_name": "kto_en_demo.json", "columns": {"kto_tag": "kto_tag"}},
}  # fmt: skip
ADAPTER = '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
FILES = {
    "data/dataset_info.json": json.dumps(SETS),
    **{f"data/{name}.json": "[]" for name, each in SETS.items() if "file_name" in str(each)},
    "own/dataset_info.json": json.dumps({"d1": {"hf_hub_url": "org/own"}, "d2": SETS["d2"]}),
    "a.py": REWARD.format("b"), "reward_func.py": REWARD.format("rewards"),
    "rewards.py": REWARD.format("accuracy_reward") + REWARD.format("think_format_reward"),
    "sft/adapter_config.json": ADAPTER, "sft/adapter_model.safetensors": "",
    "sft2/adapter_config.json": ADAPTER, "sft2/adapter_model.safetensors": "",
    "neox/config.json": json.dumps({"model_type": "gpt_neox", "num_attention_heads": 8, "hidden_size": 64}),
    "sees/config.json": '{"model_type": "own", "vision_config": {}}', "system.txt": "Be brief.\nBe kind.",
    "template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "ours.json": '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}',
    "two.yaml": "num_processes: 8\nnum_machines: 2\ndeepspeed_config: {zero_stage: 3}\n",
    "recipe.yaml": "model_name_or_path: org/m\ndataset_name: org/d\n",
    "pairs.yaml": "base_model: org/m\nrl: dpo\nlearning_rate: 1e-5\ndatasets: [{path: org/d}]\n",
    "theirs.yaml": "model_name_or_path: org/m\nstage: sft\nfinetuning_type: full\ndataset: d2\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path

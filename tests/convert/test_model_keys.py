"""Templates that are taken over by name write what theirs write, and YaRN has their factor."""

from __future__ import annotations

import json

import pytest

from rlexp.config.chat_templates import NAMED
from rlexp.convert import model_keys
from rlexp.convert.conversion import ConvertError
from rlexp.convert.rules import Fate
from tests.conftest import ROOT
from tests.convert.texts import AXOLOTL, SWIFT, conversion, named, values

WRITTEN = json.loads((ROOT / "tests" / "files" / "chat_templates.json").read_text(encoding="utf-8"))["templates"]
TABLES = {"LLaMA-Factory": model_keys.FACTORY, "axolotl": model_keys.AXOLOTL, "ms-swift": model_keys.SWIFT}
WITHOUT_SYSTEM = {("axolotl", "gemma")}  # theirs refuses a system prompt


@pytest.mark.parametrize(("framework", "theirs"), [(each, name) for each, names in TABLES.items() for name in names])
def test_a_template_is_taken_over_only_where_the_text_is_the_same(framework: str, theirs: str) -> None:
    """Their own code wrote the texts (`tests/files/chat_templates.json`), with a system prompt and without."""
    ours = TABLES[framework][theirs]
    assert ours in NAMED
    conversations = ["asked", "told"]
    if (framework, theirs) not in WITHOUT_SYSTEM:
        conversations += ["asked by a system", "told by a system"]
    cases = WRITTEN[ours]["cases"]
    assert [each for each in conversations if f"{framework} {theirs}" not in cases[each]["by"]] == []


@pytest.mark.parametrize(("said", "rope"), [
    ("{rope_scaling: {type: yarn, factor: 4.0}}", "yarn:4"),
    ("{rope_scaling: {rope_type: yarn, factor: 2.5, original_max_position_embeddings: 32768}}", "yarn:2.5:32768"),
    ("{rope_parameters: {rope_type: yarn, factor: 2}}", "yarn:2"),
    ("{rope_scaling: {type: linear, factor: 4.0}}", None),
    ("{output_router_logits: true}", None),
])  # fmt: skip
def test_yarn_of_a_model_that_axolotl_overrides(said: str, rope: str | None) -> None:
    conv = conversion(f"{AXOLOTL}overrides_of_model_config: {said}\n", None, 8)
    assert values(conv).get("model.rope") == rope
    if rope is None:
        assert any("overrides_of_model_config" in name for name in named(conv, Fate.OTHER, Fate.ABSENT))


def test_yarn_and_a_template_of_ms_swift() -> None:
    scaled = """--rope_scaling '{"type": "yarn", "factor": 4.0}' --template qwen2_5"""
    assert values(conversion(SWIFT + scaled))["model.rope"] == "yarn:4"
    assert values(conversion(SWIFT + scaled))["model.chat_template"] == "qwen"
    bare = conversion(SWIFT + "--rope_scaling yarn --template llama")
    assert {"rope_scaling", "template"} <= named(bare, Fate.OTHER)
    assert "model.rope" not in values(bare)
    with pytest.raises(ConvertError, match=r"rope_scaling=\{type: \[: must be a mapping\. For example"):
        conversion(SWIFT + "--rope_scaling '{type: ['")

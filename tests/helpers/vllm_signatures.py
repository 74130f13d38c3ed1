"""Read from vLLM's source what rlexp uses of it: the parameters of methods, the fields of classes, the environment.

    python -m tests.helpers.vllm_signatures FOLDER VERSION

adds those of a version, unpacked or installed in FOLDER, to tests/files/vllm_signatures.json. Nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

from rlexp.training.rollout.vllm.engine import SETTINGS
from tests.helpers.paths import ROOT

PATH = ROOT / "tests/files/vllm_signatures.json"
METHODS = {
    "entrypoints/llm.py": {"LLM": ("__init__", "collective_rpc", "sleep", "wake_up", "reset_prefix_cache")},
    "v1/engine/llm_engine.py": {"LLMEngine": ("add_request", "step", "has_unfinished_requests")},
    "v1/sample/logits_processor/interface.py": {
        "LogitsProcessor": ("__init__", "apply", "is_argmax_invariant", "update_state")
    },
    "outputs.py": {"RequestOutput": ("__init__",)},
}
FUNCTIONS = {"model_executor/layers/utils.py": ("dispatch_cpu_unquantized_gemm",)}
FIELDS = {
    "engine/arg_utils.py": ("EngineArgs",),
    "sampling_params.py": ("SamplingParams", "RequestOutputKind"),
    "v1/sample/logits_processor/interface.py": ("BatchUpdate", "MoveDirectionality"),
    "outputs.py": ("CompletionOutput",),
}
Signatures = dict[str, list[str]]


def signatures(package: Path) -> Signatures:
    """Return names by `Class.method`, by `Class` for its fields, and by `environment`."""
    found: Signatures = {}
    for path, classes in METHODS.items():
        for node in _classes(package / path, classes):
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {f"{node.name}.{name}": _parameters(methods[name]) for name in classes[node.name]}
    for path, functions in FUNCTIONS.items():
        tree = ast.parse((package / path).read_text(encoding="utf-8"))
        named = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in functions]
        found |= {each.name: [part.arg for part in each.args.args] for each in named}
    for path, names in FIELDS.items():
        found |= {node.name: _fields(node) for node in _classes(package / path, names)}
    environment = ast.walk(ast.parse((package / "envs.py").read_text(encoding="utf-8")))
    strings = {each.value for each in environment if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found | {"environment": sorted(strings & {*SETTINGS})}


def _classes(path: Path, names: object) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name in names]  # type: ignore[operator]


def _parameters(function: ast.FunctionDef) -> list[str]:
    parts = function.args
    named = [each.arg for each in (*parts.posonlyargs, *parts.args, *parts.kwonlyargs)]
    return [*named[1:], *([f"**{parts.kwarg.arg}"] if parts.kwarg else [])]


def _fields(node: ast.ClassDef) -> list[str]:
    fields = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields.append(each.target.id)
        elif isinstance(each, ast.Assign):
            fields += [target.id for target in each.targets if isinstance(target, ast.Name)]
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    asked = parser.parse_args()
    known = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    known[asked.version] = signatures(asked.folder / "vllm")
    PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

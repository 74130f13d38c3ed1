"""What a file says of images, videos and sound, none of which rlexp reads."""

from __future__ import annotations

import re

from rlexp.convert.conversion import Conversion
from rlexp.convert.model_keys import described
from rlexp.convert.rules import Fate

UNREAD = "rlexp reads texts alone."
OF_A_MODEL = re.compile(
    r"(?<![a-z])(?:vl|vlm|vision|omni|audio|ocr|llava|pixtral|internvl|smolvlm|voxtral|minicpm[-_]?v|glm[-_]?4v|mllama|"
    r"idefics|paligemma|qvq|cogvlm|florence)(?![a-z])",
    re.I,
)
# Arguments that only a model with images, videos or sound has.
OF_A_FILE = re.compile(
    r"(?:processor_type|image_\w+|video_\w+|freeze_(?:vit|aligner|vision_tower|multi_modal_projector|language_model)|"
    r"(?:vit|aligner)_\w+|(?i:(?:video_)?max_pixels)|FPS_MAX_FRAMES|VIDEO_\w+)"
)


def note(conv: Conversion, model: str) -> None:
    """Say first that only texts are trained on, where a model or an argument is made for more."""
    names = [name for name in conv.given if OF_A_FILE.fullmatch(name) and conv.given[name] not in (None, False)]
    theirs = conv.framework == "LLaMA-Factory"  # whose defaults these are
    frozen = [name for name in names if theirs and name.startswith("freeze_") and conv.given[name] is True]
    names = [name for name in names if name not in frozen]
    for name in frozen:
        conv.tell(Fate.NEEDLESS, name, "only with a model that reads images")
    for name in names:
        conv.remark(Fate.ABSENT, name, conv.given[name], "images, videos and sound are not read")
    named = ("/".join(model.rstrip("/").split("/")[-3:]), str(conv.given.get("model_type") or ""))
    if names or any(map(OF_A_MODEL.search, named)) or "vision_config" in described(model):
        conv.notes.insert(0, f"Images: the file is for a model that reads more than texts. {UNREAD}")

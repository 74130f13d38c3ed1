"""Long preference pairs from SQuALITY: a whole story and a question as the prompt, and two summaries."""

from __future__ import annotations

import json
from pathlib import Path


def write_long_pairs(shared: Path, file: Path) -> None:
    folder = shared / "data" / "squality"
    lines = (folder / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    stories = {document["doc_id"]: document["text"] for document in map(json.loads, lines)}
    with file.open("w", encoding="utf-8") as rows:
        for pair in map(json.loads, (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[:2]):
            prompt = f"{stories[pair['doc_id']]}\n\n{pair['question']}\n"
            rows.write(json.dumps({"prompt": prompt} | {k: pair[k] for k in ("chosen", "rejected")}) + "\n")

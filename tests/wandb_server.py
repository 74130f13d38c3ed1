"""A W&B server of the tests' own, on 127.0.0.1: what the real client sends online arrives here.

It answers the few requests without which the client gives up, and keeps what it is sent.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []  # variables of each UpsertBucket
        self.rows: list[dict[str, Any]] = []  # history
        self.exit_codes: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = outer.answer(self.path, json.loads(body or b"{}"))
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> WandbServer:
        self.thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def resumable(self, name: str | None) -> dict[str, Any] | None:
        """What the server knows of a run that was sent before."""
        if not any(run.get("name") == name for run in self.runs):
            return None
        project = {"id": "p", "name": "rlexp", "entity": {"id": "e", "name": "someone"}}
        bucket = {
            "id": "id", "name": name, "displayName": name, "tags": [], "config": "{}", "summaryMetrics": "{}",
            "wandbConfig": json.dumps({"t": {}}), "sweepName": None, "eventsTail": "[]", "logLineCount": 0,
            "eventsLineCount": 0, "historyLineCount": len(self.rows),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]),
        }  # fmt: skip
        return project | {"bucket": bucket}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            for line in body.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.rows.append(json.loads(line))
            if body.get("complete"):
                self.exit_codes.append(body.get("exitcode", 0))
            return {}
        query, variables = body.get("query", ""), body.get("variables", {})
        if "UpsertBucket" in query or "upsertBucket" in query:
            self.runs.append(variables)
            name = variables.get("name") or "run"
            bucket = {
                "id": "id",
                "name": name,
                "displayName": variables.get("displayName") or name,
                "description": None,
                "config": "{}",
                "sweepName": None,
                "historyLineCount": 0,
                "project": {"id": "p", "name": "rlexp", "entity": {"id": "e", "name": "someone"}},
            }
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "RunResumeStatus" in query:
            return {"data": {"model": self.resumable(variables.get("name"))}}
        if "Viewer" in query:
            return {"data": {"viewer": {"id": "v", "entity": "someone", "username": "someone", "flags": "{}"}}}
        return {"errors": [{"message": "not known here"}]}

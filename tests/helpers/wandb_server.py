"""A small W&B server on 127.0.0.1, which stores what the real client sends online and can be queried.

It answers the few requests that the client cannot do without, as the real server does, and keeps what it gets.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY, PROJECT = "someone", "rlexp"
WHERE = {"id": "p", "name": PROJECT, "entity": {"id": "e", "name": ENTITY}}


@dataclass
class StoredRun:
    """What the server knows about one run."""

    name: str  # W&B's word for the id
    shown: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)  # rows as JSON
    state: str = "running"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.history]

    def upsert(self, variables: dict[str, Any]) -> None:
        self.shown = variables.get("displayName") or self.shown
        self.group = variables.get("groupName") or self.group
        self.tags = variables.get("tags") or self.tags
        self.config |= json.loads(variables.get("config") or "{}")

    def stream(self, body: dict[str, Any]) -> None:
        """Store a file's lines from an offset on, over the lines that were there."""
        files = body.get("files", {})
        if "wandb-history.jsonl" in files:
            start, lines = files["wandb-history.jsonl"]["offset"], files["wandb-history.jsonl"]["content"]
            assert start <= len(self.history), "the client left a gap"
            self.history[start : start + len(lines)] = lines
        if "wandb-summary.json" in files:
            self.summary = json.loads(files["wandb-summary.json"]["content"][-1])
        if body.get("complete"):
            self.state = "failed" if body.get("exitcode") else "finished"

    def page(self, variables: dict[str, Any]) -> list[str]:
        first, last = variables["minStep"], variables["maxStep"]
        return [line for line, row in zip(self.history, self.rows, strict=True) if first <= row["_step"] < last]

    def node(self) -> dict[str, Any]:
        """Return the run as the public API expects it."""
        steps = [row["_step"] for row in self.rows]
        return {
            "id": f"id-{self.name}", "projectId": "1", "name": self.name, "displayName": self.shown, "tags": self.tags,
            "sweepName": None, "state": self.state, "config": json.dumps(self.config), "group": self.group,
            "jobType": "train", "commit": None, "readOnly": False, "createdAt": "2026-01-01T00:00:00Z",
            "heartbeatAt": "2026-01-01T00:00:00Z", "description": None, "notes": None, "systemMetrics": "{}",
            "summaryMetrics": json.dumps(self.summary), "historyLineCount": len(self.history),
            "user": {"name": ENTITY, "username": ENTITY},
            "historyKeys": {"lastStep": max(steps, default=-1), "sets": [], "keys": {}},
        }  # fmt: skip

    def bucket(self) -> dict[str, Any]:
        """Return the run as the client expects it when it may resume."""
        return {
            "id": f"id-{self.name}", "name": self.name, "displayName": self.shown, "description": None,
            "tags": self.tags, "config": json.dumps(self.config), "summaryMetrics": json.dumps(self.summary),
            "wandbConfig": json.dumps({"t": {}}), "sweepName": None, "eventsTail": "[]", "logLineCount": 0,
            "eventsLineCount": 0, "historyLineCount": len(self.history),
            "historyTail": json.dumps(self.history[-1:]), "project": WHERE,
        }  # fmt: skip


class WandbServer:
    def __init__(self) -> None:
        self.stored: dict[str, StoredRun] = {}
        self.runs: list[dict[str, Any]] = []  # variables of each UpsertBucket
        self.exit_codes: list[int] = []
        self.alerts: list[dict[str, Any]] = []
        self.artifacts: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []  # variables of each UpsertView2
        self.projects = {PROJECT}
        self.refused: str | None = None  # the error that answers every request, if any
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.startswith("/sdk/otel/"):  # the client's telemetry, which is no JSON
                    self.send_error(404)
                    return
                data = json.dumps(outer.answer(self.path, json.loads(body or b"{}"))).encode()
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

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which a client finds this server and has an account there."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}

    @property
    def only(self) -> StoredRun:
        (run,) = self.stored.values()
        return run

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for run in self.stored.values() for row in run.rows]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            self.stored[path.split("/")[-2]].stream(body)
            if body.get("complete"):
                self.exit_codes.append(body.get("exitcode", 0))
            return {}
        asked = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
        if self.refused is not None:
            return {"errors": [{"message": self.refused}]}
        data = self.data(asked[1] if asked else "", body.get("variables") or {})
        return {"errors": [{"message": "not known here"}]} if data is None else {"data": data}

    def data(self, asked: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        match asked:
            case "UpsertBucket":
                self.runs.append(variables)
                run = self.stored.setdefault(variables["name"], StoredRun(variables["name"]))
                run.upsert(variables)
                return {"upsertBucket": {"bucket": run.bucket(), "inserted": True}}
            case "RunResumeStatus":
                known = self.stored.get(variables["name"])
                return {"model": WHERE | {"bucket": known.bucket()} if known else None}
            case "Viewer" | "GetViewer" | "GetDefaultEntity":
                return {"viewer": {"id": "v", "entity": ENTITY, "username": ENTITY, "flags": "{}"}}
            case "NotifyScriptableRunAlert":
                self.alerts.append(variables)
                return {"notifyScriptableRunAlert": {"success": True}}
            case "CreateArtifact":
                self.artifacts.append(variables["input"])
                sequence = {"latestArtifact": None}
                return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
            case "UpsertView2":
                self.views.append(variables)
                return {"upsertView": {"view": {"id": "view", "name": variables["name"]}, "inserted": True}}
            case "Runs":
                return {"project": self.listed(variables["project"])}
            case "RunHistoryKeys":
                return {"project": {"run": self.stored[variables["name"]].node()}}
            case "RunParquetHistory":
                return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": []}}}}
            case "HistoryPage":
                return {"project": {"run": {"history": self.stored[variables["run"]].page(variables)}}}
            case "GetProject":
                known = variables["name"] in self.projects
                about = {"createdAt": "2026-01-01T00:00:00Z", "isBenchmark": False, "user": None}
                whose = {"__typename": "Project", "name": variables["name"], "entityName": variables["entity"]}
                return {"project": {"id": "p"} | whose | about if known else None}
        return None

    def listed(self, project: str) -> dict[str, Any] | None:
        if project not in self.projects:
            return None
        edges = [{"node": run.node(), "cursor": run.name} for run in self.stored.values()]
        return {
            "internalId": "1", "runCount": len(edges), "readOnly": False,
            "runs": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}},
        }  # fmt: skip

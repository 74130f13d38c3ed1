"""The user's reward function, in separate processes: it may hang, crash or print without harm to a rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import PythonRewardConfig
from rlexp.training.types import Sample

START_SECONDS = 300.0  # limit for the import of the function's module
CLOSE_SECONDS = 2.0  # time for a process to end by itself
NAMED = 4  # samples that an error names


class PythonReward:
    """`cfg.workers` processes. For each, a thread of this process passes on the calls and keeps the time limit."""

    def __init__(self, name: str, cfg: PythonRewardConfig, key: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[list[Sample] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Exception | dict[int, float]] = queue.SimpleQueue()
        self._open = 0
        self._workers = [Worker(cfg, key) for _ in range(cfg.workers)]
        try:
            for worker in self._workers:
                worker.begin()
            for worker in self._workers:
                worker.await_import()
        except BaseException:
            for worker in self._workers:
                worker.close()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name=f"{key} {number}")
            for number, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue one call for each worker, with equal shares."""
        share = max(1, -(-len(samples) // len(self._workers)))
        for first in range(0, len(samples), share):
            self._open += 1
            self._calls.put(list(samples[first : first + share]))

    def collect(self) -> dict[int, float]:
        """Wait for all calls, then raise the first error, so that no call is left for later."""
        errors, terms = list[Exception](), dict[int, float]()
        while self._open:
            outcome = self._outcomes.get()
            self._open -= 1
            if isinstance(outcome, Exception):
                errors.append(outcome)
            else:
                terms |= outcome
        if errors:
            raise errors[0]
        return terms

    def close(self) -> None:
        """Give up calls that were not collected, and end their processes."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)
        for worker, thread in zip(self._workers, self._threads, strict=True):
            thread.join(CLOSE_SECONDS)
            worker.interrupt()
            thread.join()
            worker.close()

    def _serve(self, worker: Worker) -> None:
        """Run in the worker's thread: pass calls to the worker. No other thread uses the worker until this one ends."""
        while (samples := self._calls.get()) is not None:
            try:
                scores = worker.scores(samples)
                self._outcomes.put({sample.place: score for sample, score in zip(samples, scores, strict=True)})
            except Exception as error:  # `collect` raises it again
                self._outcomes.put(error)


class CallFailed(Exception):
    """The function raised, or its process ended; the sample is not yet known."""


class Worker:
    """One process, started again if the last one ended."""

    _requests: Connection
    _replies: Connection
    _leash: int  # the end of a pipe: the process ends when this one, which holds it, is gone

    def __init__(self, cfg: PythonRewardConfig, key: str) -> None:
        self.cfg, self.key = cfg, key
        self._what = f"{key}.function={cfg.function}"  # for messages
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupted = False

    def begin(self) -> None:
        """Start the process. It looks for modules in the current folder first, then where this process does."""
        asked, self._requests = Pipe(duplex=False)
        self._replies, answered = Pipe(duplex=False)
        leash_end, self._leash = os.pipe()
        theirs = (asked.fileno(), answered.fileno(), leash_end)
        path = [os.getcwd(), *(entry for entry in sys.path if entry)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlexp.training.rollout.rewards.worker", self.cfg.function, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # the rank answers a Ctrl-C at the terminal
            )
        finally:
            asked.close()
            answered.close()
            os.close(leash_end)

    def await_import(self) -> None:
        try:
            reply = self._ask({}, START_SECONDS)
        except TimeoutError:
            self.kill()
            raise RewardError(f"{self._what}: its module was not imported within {START_SECONDS:g} s.") from None
        except (EOFError, OSError):
            raise RewardError(f"{self._what}: while its module was imported, {self._ended()}.") from None
        if "error" in reply:
            self.kill()
            raise RewardError(
                f"{self._what}: cannot be imported. Modules are looked for in {os.getcwd()}, then on python's own "
                f"path.\n{reply['error']}"
            )

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the scores from one call. If it fails, call once for each sample, to name the failing one."""
        try:
            return self._call(samples)
        except CallFailed as error:
            if len(samples) == 1:
                raise RewardError(f"{self._what}: for {named(samples)}: {error}") from None
            together = str(error)
        for sample in samples:
            self.scores([sample])
        raise RewardError(
            f"{self._what}: fails for {named(samples)} in one call, but for none of them alone: {together}\n"
            f"Which samples share a call is not fixed, so each must be judged on its own."
        )

    def _call(self, samples: Sequence[Sample]) -> list[float]:
        if self._interrupted:
            raise RewardError(f"{self._what}: was ended before it judged {named(samples)}.")
        if self.process is None:
            self.begin()
            self.await_import()
        try:
            reply = self._ask(request_of(samples), self.cfg.timeout_seconds)
        except TimeoutError:
            self.kill()
            raise RewardError(
                f"{self.key}.timeout_seconds={self.cfg.timeout_seconds:g}: {self._what} has not returned in that time "
                f"for {named(samples)}. Its process was killed. Raise the limit if the function needs longer."
            ) from None
        except (EOFError, OSError):
            raise CallFailed(self._ended()) from None
        if "error" in reply:
            raise CallFailed(f"it raised\n{reply['error']}")
        if "wrong" in reply:
            raise RewardError(f"{self._what}: {reply['wrong']}, for {named(samples)}.")
        return self._checked(samples, reply["scores"])

    def _ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the process's reply; raise TimeoutError if there is none in time."""
        deadline = time.monotonic() + seconds
        self._requests.send_bytes(json.dumps(request).encode())
        if not self._replies.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return json.loads(self._replies.recv_bytes())

    def _checked(self, samples: Sequence[Sample], scores: list[float]) -> list[float]:
        if len(scores) != len(samples):
            raise RewardError(
                f"{self._what}: returned {len(scores)} scores for {len(samples)} samples, {named(samples)}. It must "
                f"return one for each, in their order."
            )
        for sample, score in zip(samples, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(f"{self._what}: returned {score} for {named([sample])}. A finite number is needed.")
        return scores

    def _ended(self) -> str:
        """Say how the process ended, after it closed its pipe."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_SECONDS)
        code = self.process.poll()
        self.kill()
        if code is None:
            return "its process closed its pipe"
        return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"

    def interrupt(self) -> None:
        """End the process in the middle of its call. Called from another thread than the one that waits for it."""
        self._interrupted = True
        process = self.process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process: let it end if it waits for a call, otherwise kill it."""
        process, self.process = self.process, None
        if process is None:
            return
        self._requests.close()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._replies.close()
        os.close(self._leash)


def request_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the arguments of the function."""
    return {
        "prompts": [sample.example.text for sample in samples],
        "answers": [sample.text for sample in samples],
        "rows": [
            {"answer": sample.example.expected, "origin": sample.example.origin, "index": sample.example.index}
            for sample in samples
        ],
    }


def named(samples: Sequence[Sample]) -> str:
    """Return the names of samples for an error: `rows.jsonl:3 (sample 0), …`."""
    names = [f"{sample.example.origin} (sample {sample.number})" for sample in samples]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

"""A reward function of the user's own, in processes of its own: it may hang, crash and print, and harms no rank."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rlexp.config.schema import PythonRewardConfig
from rlexp.errors import RewardError
from rlexp.rollout.rewards.base import named
from rlexp.rollout.rewards.worker import Gone, receive, send
from rlexp.types import Sample

START_SECONDS = 300.0  # to import the function's module, with whatever that loads
CLOSE_SECONDS = 2.0  # for a process to end by itself


class PythonReward:
    """`cfg.workers` processes, each with a thread of this one that hands it calls and keeps its time."""

    def __init__(self, name: str, cfg: PythonRewardConfig, key: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[list[Sample] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
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
        """One call for each worker, of equal shares."""
        share = max(1, -(-len(samples) // len(self._workers)))
        for first in range(0, len(samples), share):
            self._open += 1
            self._calls.put(list(samples[first : first + share]))

    def collect(self) -> None:
        """All calls end before the first error is raised, so that none is left for later."""
        errors = []
        while self._open:
            error = self._outcomes.get()
            self._open -= 1
            errors += [] if error is None else [error]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Calls that nobody has collected are given up, and end with their process."""
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
        """What the worker's thread does; the worker is this thread's alone until it ends."""
        while (samples := self._calls.get()) is not None:
            try:
                for sample, score in zip(samples, worker.scores(samples), strict=True):
                    sample.terms[self.name] = score
            except Exception as error:  # raised again where it is waited for
                self._outcomes.put(error)
            else:
                self._outcomes.put(None)


class CallFailed(Exception):
    """The function raised, or its process ended; not yet known at which sample."""


class Worker:
    """One process, begun anew if the last one ended."""

    def __init__(self, cfg: PythonRewardConfig, key: str) -> None:
        self.cfg = cfg
        self.key = key
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._requests = self._replies = self._leash = -1

    @property
    def _what(self) -> str:
        return f"{self.key}.function={self.cfg.function}"

    def begin(self) -> None:
        """Start the process, which finds modules where this one does, and first where the user stands."""
        request_end, self._requests = os.pipe()
        self._replies, reply_end = os.pipe()
        leash_end, self._leash = os.pipe()
        theirs = (request_end, reply_end, leash_end)
        path = [os.getcwd(), *(entry for entry in sys.path if entry)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlexp.rollout.rewards.worker", self.cfg.function, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # a Ctrl-C at the terminal is the rank's to answer
            )
        finally:
            for fd in theirs:
                os.close(fd)

    def await_import(self) -> None:
        try:
            send(self._requests, {})
            reply = receive(self._replies, time.monotonic() + START_SECONDS)
        except TimeoutError:
            self.kill()
            raise RewardError(f"{self._what}: its module was not imported within {START_SECONDS:g} s.") from None
        except Gone:
            raise RewardError(f"{self._what}: while its module was imported, {self._ended()}.") from None
        if "error" in reply:
            self.kill()
            raise RewardError(
                f"{self._what}: cannot be imported. Modules are looked for in {os.getcwd()} and where python finds "
                f"others.\n{reply['error']}"
            )

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Of one call. If it fails, of one call for each sample, to name the one that it fails for."""
        try:
            return self._call(samples)
        except CallFailed as error:
            if len(samples) == 1:
                raise RewardError(f"{self._what}: for {named(samples)}: {error}") from None
            together = str(error)
        for sample in samples:
            self.scores([sample])
        raise RewardError(
            f"{self._what}: for {named(samples)} in one call, though for none of them alone: {together}\n"
            f"Which samples are called together is not fixed, so each must be judged on its own."
        )

    def _call(self, samples: Sequence[Sample]) -> list[float]:
        if self._interrupted:
            raise RewardError(f"{self._what}: was asked to end before it judged {named(samples)}.")
        if self.process is None:
            self.begin()
            self.await_import()
        deadline = time.monotonic() + self.cfg.timeout_seconds
        try:
            send(self._requests, request_of(samples))
            reply = receive(self._replies, deadline)
        except TimeoutError:
            self.kill()
            raise RewardError(
                f"{self.key}.timeout_seconds={self.cfg.timeout_seconds:g}: {self._what} has not returned in that time "
                f"for {named(samples)}. Its process was killed. Raise the limit if it needs longer."
            ) from None
        except Gone:
            raise CallFailed(self._ended()) from None
        if "error" in reply:
            raise CallFailed(f"it raised\n{reply['error']}")
        if "wrong" in reply:
            raise RewardError(f"{self._what}: {reply['wrong']}, for {named(samples)}.")
        return self._looked_at(samples, reply["scores"])

    def _looked_at(self, samples: Sequence[Sample], scores: list[float]) -> list[float]:
        if len(scores) != len(samples):
            raise RewardError(
                f"{self._what}: returned {len(scores)} scores for {len(samples)} samples, {named(samples)}. One for "
                f"each is needed, in their order."
            )
        for sample, score in zip(samples, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(f"{self._what}: returned {score} for {named([sample])}. A finite number is needed.")
        return scores

    def _ended(self) -> str:
        """How the process ended, which has closed its pipe."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_SECONDS)
        code = self.process.poll()
        self.kill()
        if code is None:
            return "its process closed its pipe"
        return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"

    def interrupt(self) -> None:
        """End the process in the middle of its call, from another thread than the one that waits for it."""
        self._interrupted = True
        process = self.process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process: by itself if it waits for a call, otherwise by force."""
        process, self.process = self.process, None
        if process is None:
            return
        os.close(self._requests)
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(self._replies)
        os.close(self._leash)


def request_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """What the function is called with."""
    return {
        "prompts": [sample.prompt.text for sample in samples],
        "answers": [sample.text for sample in samples],
        "rows": [
            {"answer": sample.prompt.answer, "origin": sample.prompt.origin, "index": sample.prompt.index}
            for sample in samples
        ],
    }

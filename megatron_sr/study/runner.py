"""Runs many miniature runs in parallel, each cached as a JSON file of its own: a study can be interrupted and goes on where it was.

The cache's key is a hash of a run's settings, of the code and the base that it depends on, and of torch's version; a run made by
other code is never taken for this one's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import megatron_sr
from megatron_sr.study.miniature import bases
from megatron_sr.study.miniature.settings import RunSettings

PACKAGE = Path(megatron_sr.__file__).parent
CODE = (
    "study/miniature/*.py",
    "rounding.py",
    "noise.py",
    "formats.py",
    "mxfp8.py",
    "kernels/reference.py",
    "rl/loss.py",
    "rl/advantages.py",
    "rl/drift.py",
)
"""What the result of a miniature run depends on."""


def code_hash(patterns: Sequence[str], root: Path = PACKAGE) -> str:
    """Hash of the names and bytes of the files that match, relative to `root`. Raises FileNotFoundError for a pattern without files."""
    digest = hashlib.sha256()
    for pattern in patterns:
        files = sorted(root.glob(pattern))
        if not files:
            raise FileNotFoundError(f"{root / pattern}: no such file; is the installation complete?")
        for file in files:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def _miniature_code() -> str:
    import torch

    return code_hash(CODE) + torch.__version__


@functools.lru_cache
def _base_hash(base: str) -> str:
    return hashlib.sha256((bases.folder() / f"{base}.safetensors").read_bytes()).hexdigest()


def run_key(settings: RunSettings) -> str:
    """The name of a run in the cache."""
    parts = [settings.to_dict(), _miniature_code(), _base_hash(settings.base)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


class Cache:
    """A folder of runs, one JSON file each: {"settings": ..., "run": ...}. Files are complete or not there."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> dict | None:
        """The run of that key; None if there is none or its file is damaged."""
        try:
            return json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))["run"]
        except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
            return None

    def put(self, key: str, settings: dict, run: dict) -> None:
        path = self.folder / f"{key}.json"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"settings": settings, "run": run}), encoding="utf-8")
        os.replace(partial, path)


def _start_worker() -> None:
    """In every worker: one thread, and Ctrl-C ends it without a traceback (the parent reports)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch

    torch.set_num_threads(1)


def _work(folder: Path, key: str, settings: RunSettings) -> tuple[str, dict]:
    from megatron_sr.study.miniature.loop import MiniatureRun

    run = MiniatureRun(settings).execute()
    Cache(folder).put(key, settings.to_dict(), run)
    return key, run


class Runner:
    """A pool of `jobs` processes behind a cache. Use as a context manager: it ends its processes."""

    def __init__(self, folder: Path, jobs: int):
        self.cache, self.jobs = Cache(folder), jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception) -> None:
        if self._pool:
            # Runs that have begun end and are cached; the others are not started.
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self, wanted: Sequence[RunSettings], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[dict]:
        """The results of these runs, in order; equal settings are run once.

        progress(done, total) is called at the start and whenever one is done. Raises what a run raises, and RuntimeError when a worker
        dies.
        """
        keys = [run_key(settings) for settings in wanted]
        todo = dict(zip(keys, wanted))
        done = {key: run for key in todo if (run := self.cache.get(key)) is not None}
        progress(len(done), len(todo))
        missing = {key: settings for key, settings in todo.items() if key not in done}
        # The longest first, so that no core idles at the end
        order = sorted(missing, key=lambda key: -missing[key].iterations)
        pending = {self._submit(key, missing[key]) for key in order}
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    key, run = future.result()
                    done[key] = run
                progress(len(done), len(todo))
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died (out of memory, or killed); finished runs are kept: start the command again, "
                "with --jobs 1 if memory is short"
            ) from None
        finally:
            for future in pending:
                future.cancel()
        return [done[key] for key in keys]

    def _submit(self, key: str, settings: RunSettings):
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=context, initializer=_start_worker)
        return self._pool.submit(_work, self.cache.folder, key, settings)

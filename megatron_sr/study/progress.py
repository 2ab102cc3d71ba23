"""Progress bars of a study: one for each experiment, on a terminal; a line for each on anything else."""

from __future__ import annotations

import time
from collections.abc import Callable


class StudyProgress:
    """Use as a context manager; `bar(name)` gives a function (done, total) that moves that experiment's bar."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console()
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def bar(self, name: str) -> Callable[[int, int], None]:
        """A new bar; `total` may become known with the first call."""
        task = self._progress.add_task(name, total=None)
        started, announced = time.time(), False

        def move(done: int, total: int) -> None:
            nonlocal announced
            self._progress.update(task, completed=done, total=total)
            if done == total and not announced and not self._console.is_terminal:
                announced = True
                self._console.print(f"{name}: {total} done, {time.time() - started:.0f} s", highlight=False)

        return move

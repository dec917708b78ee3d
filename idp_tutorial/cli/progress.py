"""Lines of progress, for a log file or another stream that is not a terminal."""

import sys
import time
from typing import Any

PROGRESS_SECONDS = 30.0  # between two lines


class ProgressLines:
    """Prints a line to stderr when enough time has passed since the last one."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def report(self, text: str) -> None:
        """Print a text, unless one was printed a short time ago."""
        if time.monotonic() - self.last >= PROGRESS_SECONDS:
            self.last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


class TrainingProgress:
    """Callback that prints the step and the latest validation score of a run."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the run
        self.lines = ProgressLines()
        self.score = ""

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict | None = None, **kwargs: Any
    ) -> None:
        """Remember the score."""
        self.score = "".join(f", validation {score:.1f}" for score in (metrics or {}).values())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print a line if it is time."""
        if state.is_world_process_zero:
            steps = f"step {state.global_step:,} of {state.max_steps:,}"
            self.lines.report(f"{self.name}: {steps}{self.score}")

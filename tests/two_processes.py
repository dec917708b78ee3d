"""Run a test file as two processes of one training run, which communicate through gloo."""

import faulthandler
import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SECONDS = 240  # longer on a busy machine than any of the runs needs


def run_two_processes(script: str, folder: Path) -> list[str]:
    """Run `script FOLDER` with ranks 0 and 1, and return what each wrote to stderr.

    Both are stopped after `SECONDS` seconds. Raises `AssertionError` unless both exit with 0.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    logs = [folder / f"stderr-{rank}.txt" for rank in "01"]
    workers = []
    for rank, log in zip("01", logs, strict=True):
        with log.open("w") as stderr:
            worker = subprocess.Popen(
                [sys.executable, script, folder],
                stderr=stderr,
                env={**env, "RANK": rank, "LOCAL_RANK": rank},
            )
        workers.append(worker)
    codes = [worker.wait(timeout=2 * SECONDS) for worker in workers]
    errors = [log.read_text() for log in logs]
    assert codes == [0, 0], f"exit codes of the two workers: {codes}\n" + "\n".join(errors)
    return errors


def print_stacks_if_stuck() -> None:
    """End this process after `SECONDS` seconds, and print where each of its threads was."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)

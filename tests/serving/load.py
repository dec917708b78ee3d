"""Load test of `idp serve`: requests a second, p50, p95 and memory, as one line of JSON.

    python tests/serving/load.py runs/train --clients 16 --out results/speed/server.jsonl

The model must have one task of single texts. Nothing in the tests runs this file.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from idp_tutorial.utils.durable_files import append_line
from idp_tutorial.utils.records import dump_record, read_records

WORDS = ["the", "tea", "was", "cold", "where", "is", "my", "ticket", "please", "open", "early"]


def start_server(model: str, *options: str) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port, and return it and its address once it is ready."""
    argv = [sys.executable, "-m", "idp_tutorial", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().partition("/answer")[0]
    if not address:
        raise SystemExit("the server has not started")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/ready").status_code == 200:
                return process, address
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server is not ready after a minute")


def send_requests(address: str, seconds: float, n_words: int, seed: int) -> list[tuple[float, int]]:
    """Send one request after another; return the milliseconds and the status of each."""
    rng = random.Random(seed)
    measured = []
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < deadline:
            text = " ".join(rng.choices(WORDS, k=n_words))
            start = time.perf_counter()
            status = client.post(f"{address}/answer", json={"text": text}).status_code
            measured.append((1000 * (time.perf_counter() - start), status))
    return measured


def peak_memory_mb(process: subprocess.Popen) -> float:
    """Return the largest memory of a process so far (Linux)."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure a server with clients that send one request after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a saved model")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--words", type=int, default=12, help="words of a text")
    parser.add_argument("--out", help="JSONL file to which the result is appended")
    args, options = parser.parse_known_args()
    process, address = start_server(args.model, *options)
    try:
        send_requests(address, 1, args.words, 0)  # the first requests are slower
        with ThreadPoolExecutor(args.clients) as pool:
            futures = [
                pool.submit(send_requests, address, args.seconds, args.words, seed)
                for seed in range(args.clients)
            ]
            measured = [pair for future in futures for pair in future.result()]
        times = [ms for ms, status in measured if status == 200]
        p50, p95 = np.percentile(times, [50, 95])
        run = read_records(Path(args.model) / "record.jsonl")[0]
        result = dict(
            backbone=run["backbone"],
            method=run["method"],
            versions=run["versions"],
            threads=os.environ.get("OMP_NUM_THREADS"),
            clients=args.clients,
            words=args.words,
            requests_per_second=round(len(times) / args.seconds, 1),
            p50_ms=round(p50, 1),
            p95_ms=round(p95, 1),
            refused=len(measured) - len(times),
            peak_memory_mb=round(peak_memory_mb(process)),
        )
        print(json.dumps(result))
        if args.out:
            append_line(Path(args.out), dump_record(result))
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    main()

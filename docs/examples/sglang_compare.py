"""One model and one trace of requests, served by SGLang with each decode backend in turn.

    python docs/examples/sglang_compare.py --model-path Qwen/Qwen3-Next-80B-A3B-Instruct \
        --requests 512 --rate 40 --input 1024 --output 256 -- --tp-size 4

What follows ``--`` goes to every server. Each backend is served twice, in the order A B C C B A,
since the same server is often some per cent faster the second time; the table has both runs.
Nothing but the standard library is imported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

BACKENDS = {
    "triton": [],
    "sglang-replayssm": [
        "--enable-linear-replayssm",
        "--mamba-radix-cache-strategy",
        "no_buffer",
        "--disable-overlap-schedule",
    ],
    "replayinfer": ["--linear-attn-decode-backend", "replayinfer"],
}


@dataclass
class Run:
    """What one server did with the trace."""

    backend: str
    seconds: float = 0.0
    tokens: int = 0
    failed: int = 0
    gaps: list[float] = field(default_factory=list)  # ms between two tokens of a request
    firsts: list[float] = field(default_factory=list)  # ms to the first token
    slots: str = "?"


def trace(options: argparse.Namespace) -> list[tuple[float, list[int], int]]:
    """Arrival in seconds, prompt ids and tokens to generate of every request, by the seed."""
    rng, at, requests = random.Random(options.seed), 0.0, []
    shared = [rng.randrange(2, options.vocabulary) for _ in range(options.shared)]
    for _ in range(options.requests):
        own = max(options.input - options.shared, 1)
        ids = shared + [rng.randrange(2, options.vocabulary) for _ in range(own)]
        requests.append((at, ids, rng.randint(options.output // 2, options.output)))
        at += rng.expovariate(options.rate) if options.rate else 0.0
    return requests


def ask(port: int, ids: list[int], tokens: int, run: Run, lock: threading.Lock) -> None:
    """One streamed request."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True})
    start = last = time.perf_counter()
    done, gaps, first = 0, [], None
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            said = json.loads(line[6:])
            now, have = time.perf_counter(), said["meta_info"]["completion_tokens"]
            if have <= done:
                continue
            if first is None:
                first = 1e3 * (now - start)
            else:
                gaps += [1e3 * (now - last) / (have - done)] * (have - done)
            last, done = now, have
    except (OSError, KeyError, ValueError):
        pass
    with lock:
        run.tokens += done
        run.failed += done < tokens
        run.gaps += gaps
        if first is not None:
            run.firsts.append(first)


def wait_until_up(server: subprocess.Popen[bytes], port: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/health_generate")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(1)
    raise RuntimeError(f"the server was not up after {seconds:.0f} s")


def serve(backend: str, options: argparse.Namespace) -> Run:
    """Start a server, send the trace, stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", options.model_path,
        "--port", str(port), *BACKENDS[backend], *options.server,
    ]  # fmt: skip
    log = Path(tempfile.mkstemp(prefix=f"sglang-{backend}-", suffix=".log")[1])
    run, lock = Run(backend), threading.Lock()
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_up(server, port, options.start)
            requests = trace(options)
            for _, ids, _ in requests[:4]:  # what is compiled on the first request
                ask(port, ids[::-1], 8, Run(backend), lock)
            threads, start = [], time.perf_counter()
            for at, ids, tokens in requests:
                time.sleep(max(0.0, start + at - time.perf_counter()))
                threads.append(threading.Thread(target=ask, args=(port, ids, tokens, run, lock)))
                threads[-1].start()
            for thread in threads:
                thread.join()
            run.seconds = time.perf_counter() - start
        except RuntimeError as error:
            print(f"{backend}: {error}; its log: {log}", file=sys.stderr)
            print("".join(log.read_text(errors="replace").splitlines(True)[-5:]), file=sys.stderr)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    found = re.findall(r"max_mamba_cache_size: (\d+)", log.read_text(errors="replace"))
    run.slots = found[0] if found else "?"
    return run


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.0, help="arrivals a second; 0: all at once")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="of them, the same in every prompt")
    parser.add_argument("--output", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=float, default=900, help="seconds that a start may take")
    parser.add_argument("--once", action="store_true", help="serve each backend once")
    parser.add_argument("server", nargs="*", help="arguments of every server, after --")
    options = parser.parse_args()
    names = options.backends.split(",")
    if unknown := set(names) - set(BACKENDS):
        parser.error(f"--backends: got {unknown}; allowed {', '.join(BACKENDS)}")

    head = (
        "backend",
        "tokens/s",
        "between tokens p50",
        "p99 ms",
        "first p50 ms",
        "slots",
        "failed",
    )
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|", flush=True)
    for name in names + ([] if options.once else names[::-1]):
        run = serve(name, options)
        cells = (
            run.backend,
            f"{run.tokens / run.seconds:.1f}" if run.seconds else "-",
            f"{quantile(run.gaps, 0.5):.2f}",
            f"{quantile(run.gaps, 0.99):.2f}",
            f"{quantile(run.firsts, 0.5):.1f}",
            run.slots,
            str(run.failed),
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Kernels of SGLang's decode step with one decode backend, of the models of `sglang_step`.

    python docs/benchmarks/sglang_profile.py dense32 replayinfer --batches 1,32,256 --out rows.jsonl

SGLang's model runner without its scheduler, as its one-batch benchmark has it: CUDA graphs, folds
and planning included. A kernel that was launched early waits for the one before it inside its own
time, so a kernel counts from when everything before it had ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang_step

# Kernels of the recurrence, its folds and its planning: the built-in's, SGLang's replay's and ours.
RECURRENCE = (
    "fused_recurrent", "replayssm", "selective_scan_update", "selective_state_update",
    "_prepass", "_readout_kernel", "_fold", "_fused_kernel", "_direct_kernel", "_plan", "_commit",
)  # fmt: skip
CALLS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync",
    "cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx",
)  # fmt: skip


def exclusive(events: list[tuple[float, float, str]]) -> dict[str, float]:
    """Microseconds of each kernel after everything that started before it had ended."""
    times: dict[str, float] = {}
    done = float("-inf")
    for start, end, name in sorted(events):
        times[name] = times.get(name, 0.0) + max(0.0, end - max(start, done))
        done = max(done, end)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(sglang_step.MODELS))
    parser.add_argument("backend", choices=list(sglang_step.ARMS))
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16, help="a multiple of the capacity is fair")
    parser.add_argument("--lock", type=Path, help="file that several of these take in turns")
    parser.add_argument("--out", type=Path, help="JSON rows are appended, a line each")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="sglang-profile-"))
    folder = sglang_step.write_model(options.model, place)
    sglang_step.install_plugin(place)
    sys.path.insert(0, str(place))
    os.environ["BENCH_DENSE"] = str(int(options.model == "dense32"))

    import numpy as np
    import sglang.benchmark.one_batch as one_batch
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs
    from torch.profiler import ProfilerActivity, profile

    load_plugins()
    one_batch.get_tokenizer = lambda *_, **__: None
    batches = [int(batch) for batch in options.batches.split(",")]
    most, length = max(batches), options.prompt + 4 * options.steps + 64
    arguments = sglang_step.engine_arguments(folder, batches, most * length + 4096)
    server = ServerArgs(**arguments | sglang_step.ARMS[options.backend])
    server.resolve_once()
    if options.lock:  # imports may overlap, the work on the GPU may not
        import fcntl

        turn = options.lock.open("w")  # closed, it would be another's
        fcntl.flock(turn, fcntl.LOCK_EX)
    one_batch._set_envs_and_config(server)
    ports = PortArgs.init_new(server)
    rank = one_batch.spawn_world_rank(server, tp_rank=0, pp_rank=0)
    one_batch.publish(
        server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    )
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server, ports, 0, 0)
    vocabulary = runner.torch_runner.model_config.vocab_size

    def begin(batch: int, seed: int) -> tuple[Any, Any]:
        runner.clear()
        ids = np.random.RandomState(seed).randint(2, vocabulary, (batch, options.prompt))
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(
            batch, options.prompt, ids.tolist()
        )
        tokens, _, state = runner.extend(requests)
        for _ in range(4):
            tokens, _ = runner.decode(tokens, state)
        torch.cuda.synchronize()
        return tokens, state

    for batch in batches:
        begin(batch, 1)
        tokens, state = begin(batch, 5)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            for _ in range(options.steps):
                tokens, _ = runner.decode(tokens, state)
            torch.cuda.synchronize()
        events = [
            (e.time_range.start, e.time_range.end, e.name)
            for e in profiled.events()
            if str(e.device_type).endswith("CUDA") and not e.name.startswith("step[")
        ]
        times = {name: us / options.steps for name, us in exclusive(events).items()}
        kernels = sorted(times.items(), key=lambda kernel: -kernel[1])
        counts = {e.key: e.count / options.steps for e in profiled.key_averages()}
        # The last synchronisation is that of this script.
        calls = {name: round(counts[name], 1) for name in CALLS if counts.get(name, 0) > 0.1}
        row = {
            "scope": "linear", "model": options.model, "batch": batch, "backend": options.backend,
            "us": round(sum(us for name, us in kernels if any(k in name for k in RECURRENCE)), 1),
            "all_us": round(sum(times.values()), 1), "calls": calls,
            "kernels": [[name[:60], round(us, 1)] for name, us in kernels[:20]],
        }  # fmt: skip
        print("ROW", json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()

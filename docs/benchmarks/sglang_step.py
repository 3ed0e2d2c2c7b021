"""Step times of SGLang's engine with each decode backend, of models with dummy weights.

    python docs/benchmarks/sglang_step.py dense32 --batches 1,32,256 --rounds 2 --out step.json

One engine per backend, all alive at once, measured in turns in the order A B C C B A, since the
same engine is often some per cent faster the second time. A step is the slope between a short and
a long generation of the whole batch, scheduler, sampling and overlap included.
Afterwards the tokens of 32 greedy requests are compared with those of the first backend, with the
margin of the built-in's first choice where they part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

OURS = {"linear_attn_decode_backend": "replayinfer"}
THEIRS = {"enable_linear_replayssm": True, "linear_replayssm_cache_len": 16}
ARMS = {"triton": {}, "sglang-replayssm": THEIRS, "replayinfer": OURS}

_QWEN = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 256,
    "num_attention_heads": 16, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151936, "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16",
    "rope_parameters": {
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default",
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # 24 Gated DeltaNet and 8 attention layers; the experts are replaced by a dense block.
    "dense32": _QWEN
    | {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12288,
        "num_key_value_heads": 4, "num_experts": 8,
    },
    # Eight layers of Qwen3-Next-80B's shapes, with its 512 experts.
    "next8": _QWEN
    | {
        "num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 5120,
        "num_key_value_heads": 2, "num_experts": 512,
    },
    # 24 Mamba-2, 20 MLP and 4 attention layers.
    "nemotron48": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": 4 * "M-M-M-M*" + 8 * "M-", "num_hidden_layers": 48,
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "mamba_n_groups": 8, "conv_kernel": 4, "expand": 2, "chunk_size": 128,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "use_bias": False,
        "use_conv_bias": True, "mamba_proj_bias": False, "mlp_bias": False,
        "attention_bias": False, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5,
        "vocab_size": 131072, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "dtype": "bfloat16",
    },
}  # fmt: skip

# A plugin for every backend alike: weights of a sane scale, since SGLang's dummy ones repeat one
# token, and a dense block in the place of the experts of "dense32".
_PLUGIN = """
import math, os, zlib

def register():
    import torch
    import sglang.srt.model_loader.loader as loader
    import sglang.srt.layers.activation as activation
    activation.ReLU2.forward_cuda = activation.ReLU2.forward_native  # else compiled on the spot

    if os.environ["BENCH_DENSE"] == "1":
        import sglang.srt.models.qwen3_next as model
        from sglang.srt.models.qwen2_moe import Qwen2MoeMLP

        class Dense(Qwen2MoeMLP):
            num_fused_shared_experts = 0

            def __init__(self, layer_id, config, quant_config=None, alt_stream=None, prefix="",
                         reduce_results=False, **options):
                super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act,
                                 quant_config=quant_config, reduce_results=reduce_results,
                                 prefix=prefix)

            def forward(self, x, forward_batch=None, **options):
                return super().forward(x)

        model.Qwen2MoeSparseMoeBlock = Dense

    @torch.no_grad()
    def initialize(model, *args, **kwargs):
        gemma = "Qwen" in type(model).__name__
        for name, p in model.state_dict().items():
            last = name.rpartition(".")[2]
            if not torch.is_floating_point(p) or last in ("cos_sin_cache", "inv_freq"):
                continue
            g = torch.Generator(device=p.device)
            g.manual_seed(zlib.crc32(name.encode()))
            if last == "A_log":
                p.uniform_(0.0, math.log(16.0), generator=g)
            elif last == "A":
                p.uniform_(-16.0, -1.0, generator=g)
            elif last == "dt_bias":
                u = torch.empty(p.shape, device=p.device)
                u.uniform_(math.log(1e-3), math.log(1e-1), generator=g).exp_()
                p.copy_(torch.log(torch.expm1(u)))
            elif last in ("D", "gemma_weight") or name.endswith("linear_attn.norm.weight"):
                p.fill_(1.0)
            elif "norm" in name:
                p.fill_(0.0 if gemma else 1.0)
            elif "conv1d" in name:
                p.normal_(0, 0.5, generator=g)
            elif "embed" in name:
                p.normal_(0, 1.0, generator=g)
            elif p.dim() >= 2:
                p.normal_(0, 1.0 / math.sqrt(p.shape[-1]), generator=g)
            else:
                p.zero_()

    loader.initialize_dummy_weights = initialize
"""


def install_plugin(folder: Path) -> None:
    """A distribution of one module in `folder`, found by every process that has it on its path."""
    (folder / "sglang_step_plugin.py").write_text(_PLUGIN)
    info = folder / "sglang_step_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-step-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsglang_step_plugin = sglang_step_plugin:register\n"
    )


def write_model(name: str, place: Path) -> Path:
    """A folder with the configuration of one of `MODELS`."""
    folder = place / name
    folder.mkdir()
    config = dict(MODELS[name])
    if config["model_type"] == "qwen3_next":
        kinds = ("linear_attention", "full_attention")
        config["layer_types"] = [kinds[i % 4 == 3] for i in range(config["num_hidden_layers"])]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_arguments(folder: Path | str, batches: list[int], tokens: int) -> dict[str, Any]:
    """What every engine is given: room for `tokens` of attention, a graph for each batch."""
    most = max(batches)
    return {
        "model_path": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
        "device": "cuda", "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "dtype": "bfloat16", "mamba_ssm_dtype": "float32",
        "mamba_radix_cache_strategy": "no_buffer", "disable_radix_cache": True,
        "disable_flashinfer_autotune": True, "max_running_requests": most,
        "max_mamba_cache_size": most + 8, "max_total_tokens": tokens,
        "mem_fraction_static": 0.95, "chunked_prefill_size": 16384, "max_prefill_tokens": 16384,
        "random_seed": 1, "log_level": "info", "decode_log_interval": 40,
        "cuda_graph_config": {
            "decode": {"bs": batches, "max_bs": most}, "prefill": {"backend": "disabled"},
        },
    }  # fmt: skip


# One engine -------------------------------------------------------------------------------------


def work(job: dict[str, Any]) -> None:
    """Be an engine that measures when it is told to."""
    told = Client(job["address"], "AF_UNIX")
    told.send(job["arm"])
    import numpy as np
    import sglang

    batches, prompt, short, long = job["batches"], job["prompt"], job["short"], job["long"]
    most = max(batches)
    arguments = (
        engine_arguments(job["folder"], batches, most * (prompt + long + 8) + 2048)
        | {"nccl_port": job["port"]}
        | job["arguments"]
    )
    start = time.time()
    engine = sglang.Engine(**{k: v for k, v in arguments.items() if v is not None})
    told.send(time.time() - start)

    def generate(batch: int, tokens: int, seed: int, **options: Any) -> tuple[float, list[Any]]:
        ids = np.random.RandomState(seed).randint(2, job["vocabulary"], (batch, prompt)).tolist()
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=ids, sampling_params=sampling, **options)
        return time.perf_counter() - start, answers

    while (order := told.recv())[0] != "stop":
        if order[0] == "warm":
            for batch in batches:
                generate(batch, 24, 1)
            told.send("warm")
        elif order[0] == "time":
            _, batch, seed = order
            brief, whole = generate(batch, short, seed)[0], generate(batch, long, seed + 1)[0]
            told.send(1e6 * (whole - brief) / (long - short))
        else:
            _, batch, tokens = order
            _, answers = generate(batch, tokens, 7, return_logprob=True, top_logprobs_num=2)
            told.send(
                [
                    (
                        a["output_ids"],
                        [[p[0] for p in t] for t in a["meta_info"]["output_top_logprobs"]],
                    )
                    for a in answers
                ]
            )
    engine.shutdown()


# All of them ------------------------------------------------------------------------------------


class Engines:
    """The processes, and a line to each."""

    def __init__(self, job: dict[str, Any], arms: dict[str, Any], logs: Path, wait: float) -> None:
        address = tempfile.mktemp(prefix="sglang-step-")
        listener = Listener(address, "AF_UNIX", backlog=len(arms))
        listener._listener._socket.settimeout(180)  # type: ignore[attr-defined]
        self.processes, self.lines = {}, {}
        for i, (arm, arguments) in enumerate(arms.items()):
            mine = job | {
                "address": address, "arm": arm, "port": 29600 + 37 * i,
                "arguments": job["arguments"] | arguments,
            }  # fmt: skip
            log = (logs / f"{job['model']}_{arm}.log").open("w")
            self.processes[arm] = subprocess.Popen(
                [sys.executable, __file__, "--work", json.dumps(mine)],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        for _ in arms:
            line = listener.accept()
            self.lines[line.recv()] = line
        until = time.time() + wait
        for arm in arms:
            while not self.lines[arm].poll(1.0):
                if self.processes[arm].poll() is not None or time.time() > until:
                    raise SystemExit(f"{arm} did not come up; see {logs}")
            print(f"{job['model']} {arm}: up in {self.lines[arm].recv():.0f} s", flush=True)

    def ask(self, arm: str, *order: Any) -> Any:
        self.lines[arm].send(order)
        if not self.lines[arm].poll(180):
            raise SystemExit(f"{arm} is silent")
        return self.lines[arm].recv()

    def stop(self) -> None:
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send(("stop",))
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def agreement(first: list[Any], other: list[Any]) -> dict[str, Any]:
    """Where greedy tokens part, and by how much the first backend preferred its own there."""
    equal, parts, margins = 0, [], []
    for (a, logprobs), (b, _) in zip(first, other, strict=True):
        at = next((i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q), None)
        if at is None:
            equal += 1
        else:
            parts.append(at)
            margins.append(round(logprobs[at][0] - logprobs[at][1], 4))
    return {"requests": len(first), "equal": equal, "part_at": parts, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    parser.add_argument("--backends", default=",".join(ARMS))
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=2, help="of A B C C B A")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--short", type=int, default=17)
    parser.add_argument("--long", type=int, default=145)
    parser.add_argument("--wait", type=float, default=300, help="seconds that a start may take")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--arguments", type=json.loads, default={}, help="of sglang.Engine, as JSON"
    )
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    arms = {name: ARMS[name] for name in options.backends.split(",")}

    place = Path(tempfile.mkdtemp(prefix="sglang-step-"))
    folder = Path(options.model)
    if options.model in MODELS:
        folder = write_model(options.model, place)
    install_plugin(place)
    os.environ["BENCH_DENSE"] = str(int(options.model == "dense32"))
    os.environ["PYTHONPATH"] = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    job = {
        "model": folder.name, "folder": str(folder), "batches": batches,
        "vocabulary": json.loads((folder / "config.json").read_text())["vocab_size"],
        "prompt": options.prompt, "short": options.short, "long": options.long,
        "arguments": options.arguments,
    }  # fmt: skip
    engines = Engines(job, arms, options.logs, options.wait)
    times: dict[tuple[str, int], list[float]] = {(a, b): [] for a in arms for b in batches}
    try:
        for arm in arms:
            engines.ask(arm, "warm")
        for turn in range(options.rounds):
            for arm in [*arms, *reversed(arms)]:
                for batch in batches:
                    times[arm, batch].append(engines.ask(arm, "time", batch, 100 * turn + batch))
            print(f"{folder.name}: round {turn + 1} of {options.rounds}", flush=True)
        many = min(32, max(batches))
        tokens = {arm: engines.ask(arm, "tokens", many, min(64, options.long)) for arm in arms}
    finally:
        engines.stop()

    first = next(iter(arms))
    rows = []
    print(
        "| model | batch | backend | step, ms | lowest | highest | ratio |\n" + 7 * "| --- " + "|"
    )
    for batch in batches:
        base = statistics.median(times[first, batch])
        for arm in arms:
            mine = times[arm, batch]
            us = statistics.median(mine)
            rows.append(
                {
                    "scope": "step", "model": folder.name, "batch": batch, "backend": arm,
                    "us": round(us, 1), "lowest_us": round(min(mine), 1),
                    "highest_us": round(max(mine), 1), "runs": len(mine),
                    "ratio": round(base / us, 3),
                }
            )  # fmt: skip
            low, mid, high = (f"{t / 1e3:.3f}" for t in (min(mine), us, max(mine)))
            cells = (folder.name, batch, arm, mid, low, high, f"{base / us:.2f}x")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    same = {arm: agreement(tokens[first], tokens[arm]) for arm in arms if arm != first}
    for arm, found in same.items():
        print(f"{arm}: {json.dumps(found)}", flush=True)
    if options.out:
        result = {"command": " ".join(["python", *sys.argv]), "rows": rows, "tokens": same}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
    else:
        main()

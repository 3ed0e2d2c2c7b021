"""One engine, and what a test asks of it. Run as a script, so that an engine has its own process.

``python sglang_runs.py '{"model": ..., "backend": ..., "cache": ...}'`` prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "RESULT "

CACHES: dict[str, dict[str, Any]] = {
    "no_buffer": {
        "mamba_radix_cache_strategy": "no_buffer",
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 64,
    },
    "extra_buffer": {
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 64,
        "chunked_prefill_size": 128,
    },
    "none": {"disable_radix_cache": True},
    "mixed": {"disable_radix_cache": True, "enable_mixed_chunk": True, "chunked_prefill_size": 32},
}


def arguments(model: str, cache: str, **more: Any) -> dict[str, Any]:
    """What `sglang.Engine` takes on a CPU."""
    return {
        "model_path": model,
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_running_requests": 24,
        "max_mamba_cache_size": 120,
        "max_total_tokens": 4096,
        "context_length": 512,
        "log_level": "info",
        "decode_log_interval": 20,
    } | CACHES[cache] | more  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(HERE / "shim"), os.environ.get("PYTHONPATH")))
        ),
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        **more,
    }


def start(job: dict[str, Any], **more: str) -> subprocess.Popen[str]:
    """The process of one engine; see `result`."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(job)], env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def result(process: subprocess.Popen[str], timeout: float = 300) -> tuple[dict[str, Any], str]:
    """What it printed: the result (empty if none) and everything."""
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    for line in said.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)), said
    return {}, said


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i * seed) % 250 + 2 for i in range(length)]


async def _ask(engine: Any, ids: list[int], tokens: int, rid: str | None = None) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = await engine.async_generate(input_ids=ids, sampling_params=sampling, rid=rid)
    meta = answer["meta_info"]
    return {
        "ids": answer.get("output_ids", []),
        "cached": meta.get("cached_tokens", 0),
        "retracted": meta.get("num_retractions", 0),
        "reason": (meta["finish_reason"] or {}).get("type"),
    }


async def walk(engine: Any) -> dict[str, list[dict[str, Any]]]:
    """Requests alone, after one another with shared prefixes, together, and cancelled."""
    long = prompt(200, 3)
    first = await _ask(engine, long, 40)
    out = {
        "alone": [first],
        # The same again; all of it and the answer, longer; a part of it; a part of the answer.
        "again": [
            await _ask(engine, long, 30),
            await _ask(engine, long + first["ids"][:-1] + prompt(9, 5), 30),
            await _ask(engine, long[:150] + prompt(20, 7), 30),
            await _ask(engine, long + first["ids"][:21], 30),
        ],
    }
    many = [_ask(engine, prompt(5 + 4 * i, i + 11), 8 + 2 * i) for i in range(24)]
    out["together"] = list(await asyncio.gather(*many))

    going = [
        asyncio.create_task(_ask(engine, prompt(30 + i, 90 + i), 400, rid=f"going-{i}"))
        for i in range(4)
    ]
    await asyncio.sleep(0.3)
    for i in (1, 3):
        engine.tokenizer_manager.abort_request(f"going-{i}")
    out["late"] = [await _ask(engine, prompt(50, 77), 20)]  # a prefill among running decodes
    ended = await asyncio.gather(*going)
    out["cancelled"] = [{"reason": ended[i]["reason"]} for i in (1, 3)]
    out["beside"] = [ended[0], ended[2]]
    out["after"] = [await _ask(engine, prompt(30, 91), 40), await _ask(engine, prompt(31, 91), 40)]
    return out


async def short_walk(engine: Any) -> dict[str, list[dict[str, Any]]]:
    """The first requests of `walk`, and fewer together."""
    long = prompt(200, 3)
    first = await _ask(engine, long, 60)
    many = [_ask(engine, prompt(5 + 30 * i, i + 11), 12 + 6 * i) for i in range(6)]
    return {
        "alone": [first],
        "again": [
            await _ask(engine, long + first["ids"][:-1] + prompt(9, 5), 20),
            await _ask(engine, long + first["ids"][:21], 20),
        ],
        "together": list(await asyncio.gather(*many)),
    }


def seen(answers: dict[str, list[dict[str, Any]]], seed: int) -> str:
    """A corpus for a drafter of `short_walk`: its answers, wrong here and there."""
    choose = random.Random(seed)
    prompts = [prompt(200, 3), *(prompt(5 + 30 * i, i + 11) for i in range(6))]
    corpus = []
    for asked, answer in zip(prompts, answers["alone"] + answers["together"], strict=True):
        ids = [i if choose.random() < 0.85 else choose.randrange(2, 250) for i in answer["ids"]]
        corpus.append(asked[-4:] + ids)
    return json.dumps(corpus)


def main() -> None:
    job = json.loads(sys.argv[1])
    import sglang

    engine = sglang.Engine(
        **arguments(
            job["model"], job["cache"], linear_attn_decode_backend=job["backend"],
            **job.get("more", {}),
        )
    )  # fmt: skip
    if not job.get("start_only"):
        while "TEST_CORPUS" in os.environ and not Path(os.environ["TEST_CORPUS"]).exists():
            time.sleep(0.1)
        go = short_walk if job.get("short") else walk
        answers = engine.loop.run_until_complete(go(engine))
        print(MARK + json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()

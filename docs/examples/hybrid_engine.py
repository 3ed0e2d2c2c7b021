"""A continuous-batching engine for a small hybrid model, made of replayinfer's primitives only.

    python docs/examples/hybrid_engine.py --device cpu --json

Mamba-2 layers decode by replay (`ReplayDecodeWrapper`), attention layers over pages
(`PagedAttentionWrapper`: FlashInfer on a GPU where it is installed, else torch), and
`HybridStepPlanner` plans both. Prompts are prefilled in pieces, drafts are verified while the batch
is small, and on a GPU every step but the prefill is a CUDA graph. The tokens are held against
`transformers`, which runs the same seeded model.

Queue -> admit -> prefill in pieces -> rounds of draft, verify, commit -> free.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replayinfer import (
    Draft,
    Drafter,
    NGramDrafter,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    SpeculativeSession,
    StatePool,
    read_config,
)
from replayinfer.integrations.flashinfer import (
    AttentionShape,
    HybridStepPlanner,
    KVPagePool,
    PagedAttentionWrapper,
    StepMetadata,
)

PAGE = 16  # tokens of a KV page


@dataclass
class Request:
    """A prompt, and how far the engine is with it."""

    prompt: list[int]
    new_tokens: int
    sequence: int = -1
    filled: int = 0  # tokens of the prompt that layers have taken in
    output: list[int] = field(default_factory=list)


class Switch:
    """Drafts for batches that leave compute idle, and none for larger ones."""

    def __init__(self, drafter: Drafter, up_to: int) -> None:
        self.drafter, self.up_to = drafter, up_to

    def __call__(self, contexts: Mapping[int, Sequence[int]]) -> Mapping[int, Draft]:
        return self.drafter(contexts) if len(contexts) <= self.up_to else {}


class HybridEngine:
    """Serves requests with one model. It is also the target of its speculative session.

    Parameters
    ----------
    model
        A NemotronH model of transformers; its dense parts are called, its caches never made.
    window : int
        1 + drafts of a verify step; 1 turns speculation off.
    speculate_up_to : int
        Largest batch whose sequences get drafts.
    chunk : int
        Tokens of one prefill step, over all requests.
    recurrence, attention : str
        Backends of the two decode wrappers.
    """

    def __init__(
        self, model: Any, *, max_sequences: int = 4, window: int = 4, speculate_up_to: int = 2,
        drafter: Drafter | None = None, chunk: int = 32, max_tokens: int = 192,
        recurrence: str = "auto", attention: Any = "auto",
    ) -> None:  # fmt: skip
        self.model, self.window, self.chunk = model, window, chunk
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        device, dtype = model.device, model.dtype
        layers = read_config(model.config.to_dict())
        self.buckets = [b for b in (1, 2, 4, 8, 16, 32) if b < max_sequences] + [max_sequences]

        # Recurrent layers: one pool, a wrapper to decode and one to prefill.
        # One page to spare: a prompt that goes on writes its state beside the one it continues.
        self.pool = StatePool(
            layers.spec, layers.ssm, max_sequences, max_window=window, dtype=dtype, device=device,
            checkpoint_pages=max_sequences + 1,
        )  # fmt: skip
        for i in layers.ssm:
            mixer = model.model.layers[i].mixer
            self.pool.bind(
                i, A=-mixer.A_log.exp(), D=mixer.D, dt_bias=mixer.dt_bias,
                conv_weight=mixer.conv1d.weight.squeeze(1), conv_bias=mixer.conv1d.bias,
            )  # fmt: skip
        # A step that moved states in place could not take a refused draft back.
        self.replay = ReplayDecodeWrapper(
            self.pool, backend=recurrence, buckets=self.buckets, direct="never"
        )
        self.fill = ReplayPrefillWrapper(self.pool)

        # Attention layers: a wrapper to prefill, and pages for every sequence at its longest.
        self.graphs = device.type == "cuda"
        size = 128 << 20 if self.graphs else 0  # what FlashInfer recommends; torch needs none
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self.fill_attention = PagedAttentionWrapper(self.workspace, backend=attention)
        self.fill_planner = HybridStepPlanner(self.fill_attention, self.fill)
        if self.fill_attention.backend == "flashinfer" and dtype == torch.float32:
            dtype = torch.float16  # it attends in 16 bits; fp16 keeps three more than bf16
        heads = next(iter(layers.attention.values()))
        self.shape = AttentionShape(heads.heads, heads.kv_heads, heads.head_dim, dtype, dtype)
        self.kv = KVPagePool(
            layers.attention, pages=max_sequences * -(-max_tokens // PAGE), page_size=PAGE,
            kv_heads=heads.kv_heads, head_dim=heads.head_dim, max_tokens=max_tokens,
            dtype=dtype, device=device,
        )  # fmt: skip

        self.steps: dict[tuple[int, int], Step] = {}
        self.open: StepMetadata | None = None  # of the step between verify and accept
        drafter = drafter or (NGramDrafter(window - 1) if window > 1 else lambda contexts: {})
        self.session = SpeculativeSession(self, Switch(drafter, speculate_up_to))
        self.counters: Counter[str] = Counter()

    # The model --------------------------------------------------------------------------------

    def forward(
        self, ids: torch.Tensor, meta: StepMetadata, recurrent: Any, attention: Any
    ) -> torch.Tensor:
        """Logits of every token. `ids` ``[bucket, window]`` to decode, ``[rows]`` to prefill."""
        x = self.model.model.embeddings(ids)
        for i, block in enumerate(self.model.model.layers):
            h, mixer = block.norm(x), block.mixer
            if i in self.pool.layer_index:
                h = self._recur(i, mixer, h, recurrent)
            elif i in self.kv.layers:
                h = self._attend(i, mixer, h, meta, attention)
            else:
                h = mixer(h)
            x = x + h
        return self.model.lm_head(self.model.model.norm_f(x))

    def _recur(self, i: int, mixer: Any, h: torch.Tensor, recurrent: Any) -> torch.Tensor:
        spec = self.pool.spec
        inner, keys = spec.heads * spec.dim, spec.groups * spec.state
        gate, rows, dt = mixer.in_proj(h).split([inner, inner + 2 * keys, spec.heads], -1)
        x, B, C = recurrent.conv(i, rows.contiguous()).split([inner, keys, keys], -1)
        y = recurrent.run(
            i, x=x.unflatten(-1, (spec.heads, spec.dim)), dt=dt,
            B=B.unflatten(-1, (spec.groups, -1)), C=C.unflatten(-1, (spec.groups, -1)),
        )  # fmt: skip
        return mixer.out_proj(mixer.norm(y.flatten(-2), gate))

    def _attend(
        self, i: int, mixer: Any, h: torch.Tensor, meta: StepMetadata, attention: Any
    ) -> torch.Tensor:
        flat, head = h.flatten(0, -2), (-1, self.shape.head_dim)
        q, k, v = (getattr(mixer, f"{n}_proj")(flat).unflatten(-1, head) for n in "qkv")
        self.kv.append(i, k, v, meta)
        y = attention.run(q.to(self.kv.dtype), self.kv.cache(i)).to(h.dtype)
        return mixer.o_proj(y.flatten(-2)).view_as(h)

    # A decode step, as a session's target ------------------------------------------------------

    @property
    def max_window(self) -> int:
        return self.window

    def verify(
        self,
        sequences: Sequence[int],
        windows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Plan both halves, fold, run: logits ``[batch, window, vocabulary]``."""
        lengths = [len(window) for window in windows]
        # Two widths only, so that there are two graphs a bucket.
        width = 1 if max(lengths) == 1 else self.window
        bucket = next(b for b in self.buckets if b >= len(sequences))
        if (bucket, width) not in self.steps:
            self.steps[bucket, width] = Step(self, bucket, width)
        step = self.steps[bucket, width]
        ids = torch.zeros((bucket, width), dtype=torch.long)
        for row, window in enumerate(windows):
            ids[row, : len(window)] = torch.tensor(window)
        meta = self.kv.step(sequences, lengths, bucket=bucket, window=width)
        try:
            plan = step.planner.plan(meta, self.shape, parents=parents)
        except BaseException:
            self.kv.abort(meta)
            raise
        self.open = meta
        try:
            self.replay.fold()
            logits = step.run(ids, meta, plan)
        except BaseException:
            self.abort()
            raise
        self.counters.update(decode_steps=1, draft_steps=int(width > 1))
        return logits[: len(sequences)]

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep so many tokens of each window: a cursor moves, in both halves."""
        counts = [len(path) for path in paths]
        self.replay.commit(counts)
        self.kv.commit(self.open, counts)

    def abort(self) -> None:
        self.replay.abort()
        self.kv.abort(self.open)

    # Requests ---------------------------------------------------------------------------------

    @torch.no_grad()
    def serve(self, requests: Sequence[Request]) -> None:
        """Run until every request has its tokens; they come and go on their own."""
        waiting, filling, running = deque(requests), deque[Request](), list[Request]()
        while waiting or filling or running:
            while waiting and len(filling) + len(running) < self.max_sequences:
                filling.append(self._admit(waiting.popleft()))
            running += self._prefill(filling)
            decoding = [r for r in running if len(r.output) < r.new_tokens]
            if decoding:
                self.counters[f"steps_of_{len(decoding)}"] += 1
                # Of a round no more than a request still wants, so that nothing is thrown away.
                limits = {r.sequence: r.new_tokens - len(r.output) for r in decoding}
                new = self.session.step(list(limits), limits=limits)
                for request in decoding:
                    request.output += new[request.sequence]
            for request in [r for r in running if len(r.output) >= r.new_tokens]:
                running.remove(request)
                self.session.remove(request.sequence)
                self.pool.free(request.sequence)
                self.kv.free([request.sequence])

    def _admit(self, request: Request) -> Request:
        longest = len(request.prompt) + request.new_tokens + self.window
        if longest > self.max_tokens:
            raise ValueError(
                f"request: got {longest} tokens, a window included; allowed {self.max_tokens}; "
                "make the engine with more max_tokens"
            )
        (request.sequence,) = self.pool.alloc()
        self.kv.open([request.sequence])
        return request

    def _prefill(self, filling: deque[Request]) -> list[Request]:
        """One piece of `chunk` tokens over the requests in front; returns those that are done."""
        pieces: list[tuple[Request, int]] = []
        room = self.chunk
        for request in filling:
            if room:
                pieces.append((request, min(room, len(request.prompt) - request.filled)))
                room -= pieces[-1][1]
        if not pieces:
            return []
        ids = [t for r, n in pieces for t in r.prompt[r.filled : r.filled + n]]
        counts = [n for _, n in pieces]
        meta = self.kv.step([r.sequence for r, _ in pieces], counts, packed=True)
        self.fill_planner.plan(meta, self.shape)
        tokens = torch.tensor(ids, device=self.model.device)
        logits = self.forward(tokens, meta, self.fill, self.fill_attention)
        self.fill.commit()
        self.kv.commit(meta)
        self.counters.update(prefill_steps=1, prefill_tokens=len(ids))
        last = (torch.tensor(counts).cumsum(0) - 1).to(logits.device)
        done = []
        for (request, count), token in zip(pieces, logits[last].argmax(-1).tolist(), strict=True):
            request.filled += count
            if request.filled == len(request.prompt):
                request.output.append(token)
                self.session.add(request.sequence, [*request.prompt, token])
                filling.remove(request)
                done.append(request)
        return done


class Step:
    """The decode step of one bucket and window: its attention wrapper, its plan, its graph."""

    def __init__(self, engine: HybridEngine, bucket: int, window: int) -> None:
        self.engine = engine
        device = engine.model.device
        self.ids = torch.zeros((bucket, window), dtype=torch.long, device=device)
        # The metadata's own arrays serve as the wrapper's: one address each, for good.
        buffers = engine.kv.buffers(bucket, window).prefill_buffers() if engine.graphs else {}
        self.attention = PagedAttentionWrapper(
            engine.workspace, use_cuda_graph=engine.graphs, **buffers,
            backend=engine.fill_attention.backend,
        )  # fmt: skip
        self.planner = HybridStepPlanner(self.attention, engine.replay)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    def run(self, ids: torch.Tensor, meta: StepMetadata, plan: Any) -> torch.Tensor:
        engine = self.engine
        self.ids.copy_(ids)
        if self.graph is not None:
            self.graph.replay()
            engine.counters["graph_replays"] += 1
            plan.layers_run.update(engine.pool.layers)  # by the graph
            return self.logits
        logits = engine.forward(self.ids, meta, engine.replay, self.attention)
        if engine.graphs:  # the first step ran and compiled; captured, it writes nothing
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = engine.forward(self.ids, meta, engine.replay, self.attention)
        return logits


# The model, the reference, the command ----------------------------------------------------------


def build_model(device: str, seed: int) -> Any:
    """Six layers with seeded weights, of which logits depend on state and keys."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    from replayinfer.demo.models import scale_weights

    config = NemotronHConfig(
        vocab_size=256, hidden_size=96, intermediate_size=192,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention",
                           "linear_attention", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=64, n_groups=2, chunk_size=64,
        time_step_min=1e-6, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(config).eval()
    scale_weights(model, torch.Generator().manual_seed(seed))
    return model.to(device)


def reference(model: Any, request: Request) -> list[int]:
    """Greedy tokens by transformers, one prompt at a time."""
    ids = torch.tensor([request.prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.new_tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(request.prompt) :].tolist()


def requests(count: int, new_tokens: int, seed: int) -> list[Request]:
    """Prompts of 1 to 59 tokens, each a word again and again; answers of three lengths."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=rng).tolist()
    words = torch.randint(0, 256, (count, 12), generator=rng).tolist()
    return [
        Request((word * 5)[:length], max(new_tokens * (i % 3 + 1) // 3, 1))
        for i, (word, length) in enumerate(zip(words, lengths, strict=True))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", default="auto", choices=["auto", "flashinfer", "torch"])
    parser.add_argument("--requests", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=24, help="of the longest answer")
    parser.add_argument("--window", type=int, default=4, help="1 + drafts; 1: no speculation")
    parser.add_argument("--speculate-up-to", type=int, default=2, help="largest batch with drafts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)

    model = build_model(args.device, args.seed)
    engine = HybridEngine(
        model, window=args.window, speculate_up_to=args.speculate_up_to, attention=args.attention
    )
    served = requests(args.requests, args.new_tokens, args.seed)
    engine.serve(served)
    expected = [reference(model, request) for request in served]
    pairs = [
        p for r, e in zip(served, expected, strict=True) for p in zip(r.output, e, strict=True)
    ]
    result = {
        "tokens": len(pairs),
        "tokens_equal": sum(ours == theirs for ours, theirs in pairs),
        "device": args.device,
        "attention": engine.fill_attention.backend,
        "recurrence": engine.replay.backend.name,
        "pages_leaked": engine.kv.pages_in_use() + sum(engine.pool.pages_in_use().values()),
        "engine": engine.counters,
        "steps": engine.replay.counters.as_dict(),
        "speculation": vars(engine.session.counters),
        "output": [request.output for request in served],
    }
    lines = (f"{name:14} {value}" for name, value in result.items())
    print(json.dumps(result) if args.json else "\n".join(lines))
    return 0 if result["tokens"] == result["tokens_equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

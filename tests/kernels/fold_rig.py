"""A fold list of a delta-rule layer by itself: rows and checkpoints filled in, pages chosen, NaN
everywhere else. The truth is the recurrence in float64, row by row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from replayinfer import GDNSpec, KDASpec, StatePool
from replayinfer.backends.torch.delta import advance
from replayinfer.backends.triton.delta_fold import fold
from replayinfer.backends.triton.workspace import FoldArrays
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import relative_error

EPSILON = torch.finfo(torch.float32).eps
# Half a unit in the last place, the most that one rounding does.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
EDGES = (0.0, -1e-30, -5.0, -80.0, -1280.0, -1e30, -float("inf"))


@dataclass(frozen=True)
class FoldCase:
    family: str = "gdn"
    heads: int = 2
    key_heads: int = 1
    dim: int = 8
    state: int = 16
    norm: str = "l2"
    format: str = "fp32_split"
    dtype: torch.dtype = torch.bfloat16
    gates: str = "realistic"
    capacity: int = 3
    page_rows: int = 2
    layers: int = 1
    rows: tuple[int, ...] = (3, 0, 1)  # of the folds
    in_place: bool = False
    pads: int = 2
    tile: tuple[int, int, int] = (1, 16, 16)  # warps, rows, columns; (): as the rule has it

    def __str__(self) -> str:
        base = FoldCase()
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "family" and getattr(self, f.name) != getattr(base, f.name)
        }
        words = [f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()]
        return "-".join([self.family, *words])

    def but(self, **changes) -> FoldCase:
        return dataclasses.replace(self, **changes)

    @property
    def spec(self) -> GDNSpec | KDASpec:
        names = ("heads", "key_heads", "dim", "state", "norm")
        kind = {"gdn": GDNSpec, "kda": KDASpec}[self.family]
        return kind(**{name: getattr(self, name) for name in names}, conv_width=0, gate="log")


class FoldRig:
    """`pages` makes room for more checkpoint pages than the folds need; the last are used."""

    def __init__(
        self, case: FoldCase, rng: torch.Generator, device: str = "cpu", *, pages: int = 0
    ) -> None:
        self.case, self.spec, self.rng, self.device = case, case.spec, rng, device
        folds, per = len(case.rows), -(-case.capacity // case.page_rows)
        self.pool = pool = StatePool(
            self.spec, range(case.layers), folds, capacity=case.capacity, format=case.format,
            dtype=case.dtype, page_rows=case.page_rows, device=device,
            checkpoint_pages=max(pages, 2 * folds + 1), input_pages=folds * per + 1,
        )  # fmt: skip
        for field in pool.inputs.fields.values():
            field.fill_(float("nan"))
        # A NaN in both planes of a state that is split.
        pool.checkpoints.storage.fill_(-1 if case.format == "fp32_split" else float("nan"))
        spare = max(pages - 2 * folds - 1, 0)
        ids = (torch.randperm(2 * folds + 1, generator=rng) + spare).tolist()
        self.source, self.target = ids[:folds], ids[:folds] if case.in_place else ids[folds:-1]
        ids = torch.randperm(folds * per + 1, generator=rng).tolist()
        self.table = [
            ids[i * per : i * per + -(-rows // case.page_rows)] for i, rows in enumerate(case.rows)
        ]
        for layer in range(case.layers):
            states = torch.randn(folds, *self.spec.state_shape, generator=rng)
            pool.checkpoints.store(layer, self._ids(self.source), states.to(device))
            for i in range(folds):
                self.fill(layer, i)

    def fill(self, layer: int, i: int) -> None:
        """Fresh rows of fold `i`, all but the dead ones."""
        case, size = self.case, self.case.page_rows
        for j in range(case.rows[i]):
            place = (layer, self.table[i][j // size], j % size)
            for name, value in self.row().items():
                self.pool.inputs.fields[name][place] = value.to(self.device)

    def row(self) -> dict[str, torch.Tensor]:
        case, spec, rng = self.case, self.spec, self.rng
        k = torch.randn(case.key_heads, case.state, generator=rng)
        if case.norm == "none":
            k = 0.99 * torch.nn.functional.normalize(k, dim=-1)
        k = k.to(case.dtype).float()
        gate = [int(getattr(spec, name)) for name in spec.gate_dims]
        values = {
            "k": k,
            "k_scale": torch.rsqrt((k * k).sum(-1) + spec.norm_eps),
            "g": self.gates(gate),
            "beta": torch.rand(case.heads, generator=rng),
            "v": torch.randn(case.heads, case.dim, generator=rng),
            "u": torch.randn(case.heads, case.dim, generator=rng),
        }
        return {name: values[name] for name in self.pool.inputs.fields}

    def gates(self, shape: list[int]) -> torch.Tensor:
        uniform = torch.rand(shape, generator=self.rng)
        if self.case.gates == "edges":
            return torch.tensor(EDGES)[(uniform * len(EDGES)).long()]
        if self.case.gates == "bounded":  # at the bound and near it
            return -5.0 + 0.1 * (uniform - 0.5).clamp_min(0)
        low, high = {"realistic": (1e-3, 1.6), "near_one": (1e-6, 1e-3)}[self.case.gates]
        return -low * (high / low) ** uniform

    # The truth --------------------------------------------------------------------------------

    def recurrence(
        self, layer: int, i: int, state: torch.Tensor, dtype: torch.dtype, rows: int | None = None
    ) -> torch.Tensor:
        """`state` ``[heads, dim, state]`` after the rows of fold `i`, one by one."""
        spec, size = self.spec, self.case.page_rows
        solves = spec.resolves(self.pool.format)
        state = state.to("cpu", dtype)
        for j in range(self.case.rows[i] if rows is None else rows):
            place = (layer, self.table[i][j // size], j % size)
            row = {n: f[place].to("cpu", dtype) for n, f in self.pool.inputs.fields.items()}
            k = row["k"]
            if spec.norm == "l2":
                exact = torch.rsqrt((k * k).sum(-1) + spec.norm_eps)
                k = k * (exact if dtype == torch.float64 else row["k_scale"])[:, None]
            k = k.repeat_interleave(spec.head_ratio, 0)[:, None]
            state = state * torch.exp(row["g"]).view(spec.heads, 1, -1)
            u = row["u"][..., None]
            if solves:
                seen = (state * k).sum(-1, keepdim=True)
                u = row["beta"][:, None, None] * (row["v"][..., None] - seen)
            state = state + u * k
        return state

    # The fold ---------------------------------------------------------------------------------

    def _ids(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self.device)

    def arrays(self) -> FoldArrays:
        """As a plan has them: pads of -1 behind the valid entries, tables filled up with -1."""
        case, pads = self.case, [-1] * self.case.pads
        per = self.pool.sizes.pages_per_sequence
        table = [t + [-1] * (per - len(t)) for t in self.table] + [[-1] * per] * case.pads

        def ints(values) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        count = len(case.rows)
        return FoldArrays(
            ints(self.source + pads), ints(self.target + pads),
            ints([*case.rows, *[case.capacity] * case.pads]), ints(table), ints([count]),
        )  # fmt: skip

    def config(self):
        if not self.case.tile:
            return forced()
        warps, rows, columns = self.case.tile
        choice = LaunchConfig(num_warps=warps, rows=rows, columns=columns, programs_per_sm=2)
        return forced(fold=choice, fold32=choice)

    def fold(self) -> None:
        ckpt, arrays = self.pool.checkpoints, self.arrays()
        bucket = len(self.case.rows) + self.case.pads
        with self.config():
            fold(self.pool, slice(None), ckpt.plane, ckpt.low, arrays, bucket)

    def check(self) -> None:
        """Fold, and compare every head with the recurrence and with the torch backend."""
        pool, case = self.pool, self.case
        ckpt = pool.checkpoints
        before = ckpt.storage.clone()
        held = {name: field.clone() for name, field in pool.inputs.fields.items()}
        sources, targets = self._ids(self.source), self._ids(self.target)
        starts = [ckpt.load(layer, sources) for layer in range(case.layers)]
        counts = self._ids(list(case.rows))
        table = self.arrays().fold_table[: len(case.rows)].long()
        theirs = [
            advance(pool, self.spec, layer, start, table, counts)
            for layer, start in enumerate(starts)
        ]
        self.fold()
        for layer, start in enumerate(starts):
            got = ckpt.load(layer, targets).cpu()
            assert not got.isnan().any()
            for i in range(len(case.rows)):
                exact = self.recurrence(layer, i, start[i], torch.float64)
                plain = self.recurrence(layer, i, start[i], torch.float32)
                # The torch backend adds in yet another order: it is held to the worst head.
                worst = max(relative_error(plain[h], exact[h]) for h in range(case.heads))
                for h in range(case.heads):
                    self.compare(got[i, h], exact[h], plain[h], theirs[layer][i, h].cpu(), worst)
        keep = torch.ones(before.shape[1], dtype=torch.bool, device=self.device)
        keep[targets] = False
        assert torch.equal(bits(ckpt.storage)[:, keep], bits(before)[:, keep]), "another page"
        for name, field in pool.inputs.fields.items():
            assert torch.equal(bits(field), bits(held[name])), f"rows of {name}"

    def compare(self, got, exact, plain, theirs, worst) -> None:
        # A plain computation of few rows may be right to the last bit by chance.
        error, own = relative_error(got, exact), max(relative_error(plain, exact), EPSILON)
        rounding = ROUNDING.get(self.case.format, 0.0)
        assert error <= rounding + 3 * own, f"{error}, plain fp32 {own}"
        assert relative_error(got, theirs) <= rounding + 4 * max(own, worst), "torch backend"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Patterns, so that NaN compare."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])

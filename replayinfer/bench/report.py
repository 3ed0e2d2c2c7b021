"""A bench report for people: a table per scope, and a plot of speed-up over batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..figures import two_panels

if TYPE_CHECKING:
    from .policies import PolicyReport
    from .run import BenchReport

__all__ = ["kept", "markdown_table", "plot", "plot_policies", "scopes", "shape"]

_SCOPES = {
    "ssm": "The state's step alone",
    "mixer": "The convolution and the step, up to what the layer's gated norm reads",
}


def scopes(report: BenchReport) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each scope that was measured, with its title."""
    for scope, title in _SCOPES.items():
        if rows := [row for row in report.rows if row["scope"] == scope]:
            yield title, rows


def markdown_table(report: BenchReport) -> str:
    """The rows as Markdown tables, with what made them above and who was left out below."""
    ceiling = report.read_ceiling_tbps
    peers = ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))
    lines = [
        f"`{report.command}`",
        "",
        f"{report.device}, torch {report.torch}, triton {report.triton}, commit {report.commit}, "
        f"{report.date}. Peers: {peers or 'none installed'}. Read ceiling {ceiling} TB/s. "
        "Microseconds per layer and step, CUDA graph, cold L2, staggered histories, folds, prepass "
        "and plan uploads counted, median, arms interleaved. The last column is the time that the "
        "bytes of a step need at the ceiling.",
    ]
    if any(row["window"] > 1 for row in report.rows):
        lines += [
            "",
            "T: tokens of a window, its drafts among them. r: the probability that a draft is "
            "right where all before it were. Standard kernels write a state per token; what copies "
            "the accepted one back is not timed.",
        ]
    for title, rows in scopes(report):
        lines += [
            "",
            f"{title}:",
            "",
            "| layer | batch | format | L | ours | standard kernel | its time | ratio | bytes / "
            "ceiling |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            floor = row["bytes"] / ceiling / 1e6
            ratio = "–" if row["ratio"] is None else f"**{row['ratio']:.2f}x**"
            theirs = "–" if row["baseline_us"] is None else f"{row['baseline_us']:.1f}"
            lines.append(
                f"| {shape(row)} | {row['batch']} | {row['format']} | {kept(row)} | "
                f"{row['ours_us']:.1f} | {row['baseline']}, {row['state_dtype']} | {theirs} | "
                f"{ratio} | {floor:.1f} |"
            )
    if report.skipped:
        lines += ["", "Not timed:", ""]
        lines += [f"- {name}: {reason}" for name, reason in sorted(report.skipped.items())]
    return "\n".join(lines) + "\n"


def shape(row: dict[str, Any]) -> str:
    """``mamba2 128 x 64 x 128, 8``: heads, dim, state, shared heads."""
    shared = row.get("groups", row.get("key_heads"))
    return f"{row['family']} {row['heads']} x {row['dim']} x {row['state']}, {shared}"


def kept(row: dict[str, Any]) -> str:
    """Rows before a fold, or ``direct`` where none are kept; with windows, those too."""
    if row["direct"]:
        return "direct"
    window = "" if row["window"] == 1 else f", T={row['window']}, r={row['commit_rate']:g}"
    return f"{row['capacity']}{window}"


def plot(report: BenchReport, path: Path) -> None:
    """Speed-up over batch, and how far each batch is from its bytes at the read ceiling.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed (extra ``bench``).
    """
    with two_panels(path) as (left, right):
        series: dict[str, list[dict[str, Any]]] = {}
        for row in report.rows:
            scope = "" if row["scope"] == "ssm" else f", {row['scope']}"
            length = kept(row) if row["window"] > 1 else row["capacity"]
            label = f"{shape(row)}, {row['format']}, L={length}{scope}"
            series.setdefault(label, []).append(row)
        for label, rows in series.items():
            rows = sorted(rows, key=lambda r: int(r["batch"]))
            batches = [r["batch"] for r in rows]
            if all(r["ratio"] is not None for r in rows):
                left.plot(batches, [r["ratio"] for r in rows], marker="o", label=label)
            share = [r["bytes"] / report.read_ceiling_tbps / 1e6 / r["ours_us"] for r in rows]
            right.plot(batches, share, marker="o", label=label)
        left.axhline(1.0, color="gray", linewidth=1)
        for axis, title in (
            (left, "speed-up over the standard kernel"),
            (right, "time the bytes need at the read ceiling / time taken"),
        ):
            axis.set(xscale="log", xlabel="batch", title=title)
            axis.grid(alpha=0.3)
        right.set_ylim(0, 1.05)
        right.legend(fontsize=8)


def plot_policies(report: PolicyReport, path: Path) -> None:
    """Median and 99th percentile of a step, by arrivals and policy, and their ratio.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed (extra ``bench``).
    """
    arrivals = list(dict.fromkeys(row.arrivals for row in report.rows))
    policies = list(dict.fromkeys(row.policy for row in report.rows))
    width = 0.8 / len(policies)
    with two_panels(path) as (left, right):
        for i, policy in enumerate(policies):
            rows = [row for row in report.rows if row.policy == policy]
            places = [arrivals.index(row.arrivals) + (i + 0.5) * width - 0.4 for row in rows]
            left.bar(places, [row.p50_us for row in rows], width, color=f"C{i}", label=policy)
            above = [row.p99_us - row.p50_us for row in rows]
            medians = [row.p50_us for row in rows]
            left.bar(places, above, width, bottom=medians, color=f"C{i}", alpha=0.4)
            right.bar(places, [row.tail for row in rows], width, color=f"C{i}", label=policy)
        for axis, title in (
            (left, "microseconds a layer and step: median, and up to the 99th percentile"),
            (right, "99th percentile / median"),
        ):
            axis.set_xticks(range(len(arrivals)), arrivals)
            axis.set_title(title, fontsize=10)
            axis.grid(alpha=0.3, axis="y")
        right.axhline(1.0, color="gray", linewidth=1)
        right.legend(fontsize=8)

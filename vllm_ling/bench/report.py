# SPDX-License-Identifier: Apache-2.0
"""A result of `vllm-ling bench decode` as a markdown table and as a plot: where the time of a step goes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_ling.eval.report import svg
from vllm_ling.eval.report.beside import write_beside

_SHOWN = 8  # kernels in the plot
_ROW = 40


def write_report(path: Path) -> None:
    """Writes `.md` and `.svg` beside the result; no `.svg` where nothing was measured.

    Raises:
        LingError: the file is missing or no result of bench decode.
    """
    write_beside(path, "bench decode", markdown, plot)


def markdown(result: dict[str, Any]) -> str:
    """The rows as a table, other workloads and failures under it."""
    lines = [
        "| workload, context | ms a token | stock | ratio | GPU ms a step | launches a token | GB, DRAM / floor |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        stock, floor = row.get("stock_ms_per_token"), row["floor_bytes_per_token"]
        dram = row["dram_bytes_per_token"]
        cells = [
            f"{row['workload']}, {row['context']}",
            _number(row["ms_per_token"], 2) + _spread(row.get("spread_ms")),
            _number(stock, 2) + _spread(row.get("stock_spread_ms")),
            _ratio(stock, row["ms_per_token"]),
            f"{_number(row['gpu_ms_per_step'], 2)} (stock {_number(row.get('stock_gpu_ms_per_step'), 2)})",
            f"{_number(row['launches_per_token'], 0)} (stock {_number(row.get('stock_launches_per_token'), 0)})",
            f"{_number(dram and dram / 1e9, 2)} / {_number(floor and floor / 1e9, 2)}"
            + _share(row.get("floor_share")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for row in result["extras"]:
        ours, stock = row.get("ms"), row.get("stock_ms")
        cells = [row["workload"], _number(ours, 2), _number(stock, 2), _ratio(stock, ours), "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    starts = ", ".join(f"{label} {entry['start_s']:.0f}" for label, entry in result["engines"].items())
    gpus = ", ".join(result["provenance"]["gpus"]) or "no GPU named"
    memory = f"; floor at {result['bandwidth'] / 1e12:.2f} TB/s" if "bandwidth" in result else ""
    lines += ["", f"{gpus}{memory}. Engine start, s: {starts or 'none'}.{_where(result)}"]
    lines += [
        f"\nFAILED: {label}: ...{' '.join(why.split())[-300:]}" for label, why in result["errors"].items()
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any]) -> str:
    """One panel a workload at its first context: a step end to end, on the GPU, by kernel, and the floor as a line."""
    panels = []
    for row in result["rows"]:
        kernels = result["kernels"].get(f"ours {row['workload']} {row['context']}")
        if kernels is not None and row["ms_per_token"] is not None:
            panels.append((row, _bars(result, row, kernels)))
    if not panels:
        return ""
    x = svg.axis("microseconds a step", [us for _, bars in panels for _, us, _ in bars])
    height = sum(30 + _ROW * len(bars) for _, bars in panels)
    inside = svg.Frame(x, svg.axis("", []), 20, svg.WIDTH - 24, 6, 6 + height)
    body, top = svg.x_axis(inside), inside.top
    for row, bars in panels:
        body.append(svg.text(inside.left, top + 18, f"{row['workload']}, context {row['context']}", "name"))
        top += 30
        floor = _floor_us(result, row)
        if floor is not None:
            body.append(svg.link(inside, floor, top, top + _ROW * len(bars)))
        for label, us, series in bars:
            body.append(svg.text(inside.left + 4, top + 14, f"{label}: {us:.0f}", "halo"))
            body.append(
                svg.bar(inside, 0, us, top + 19, 13, f"bar {svg.look(series)}", f"{label}: {us:.1f} us")
            )
            top += _ROW
    told = "; ".join(f"{label} {us:.0f} us" for _, bars in panels for label, us, _ in bars)
    return svg.alone(svg.svg("decode-step", f"Where the time of a step goes. {told}", height + 64, body))


def _bars(
    result: dict[str, Any], row: dict[str, Any], kernels: Iterable[Any]
) -> list[tuple[str, float, int]]:
    """Label, microseconds a step and series of every bar of a panel; what is unknown has none."""
    engine = result["engines"][f"ours {row['workload']}"]
    emitted = engine["accept_length"] if engine["draft_tokens"] else 1.0
    stock = row.get("stock_ms_per_token")
    bars = [
        ("stock, end to end", stock and stock * emitted * 1e3, 5),
        ("stock, GPU", row.get("stock_gpu_ms_per_step") and row["stock_gpu_ms_per_step"] * 1e3, 5),
        ("end to end", row["ms_per_token"] * emitted * 1e3, 0),
        ("GPU", row["gpu_ms_per_step"] and row["gpu_ms_per_step"] * 1e3, 0),
        ("floor: bytes at the bandwidth of memory", _floor_us(result, row), 2),
    ]
    # Template arguments are for the JSON; a line of the plot has no room for them.
    listed = [(f"{name.split('<')[0][:48]} ({count:.0f} x)", us) for name, count, us in kernels]
    bars += [(label, us, 1) for label, us in listed[:_SHOWN]]
    bars.append(
        (
            "other kernels",
            max(0.0, 1e3 * engine["steps"]["kernel_ms"] - sum(us for _, us in listed[:_SHOWN])),
            1,
        )
    )
    return [(label, us, series) for label, us, series in bars if us is not None]


def _where(result: dict[str, Any]) -> str:
    """In which process the engines ran and how they scheduled, if the result says it of all of them."""
    found = {(entry.get("engine"), entry.get("async_scheduling")) for entry in result["engines"].values()}
    if len(found) != 1:
        return ""
    ((engine, ahead),) = found
    scheduling = "" if ahead is None else f", async scheduling {'on' if ahead else 'off'}"
    return f" Engine in: {engine}{scheduling}." if engine else ""


def _floor_us(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    engine = result["engines"][f"ours {row['workload']}"]
    emitted = engine["accept_length"] if engine["draft_tokens"] else 1.0
    floor = row["floor_bytes_per_token"]
    if floor is None or "bandwidth" not in result:
        return None
    return float(floor * emitted / result["bandwidth"] * 1e6)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(spread: list[float] | None) -> str:
    return "" if spread is None else f" ({spread[0]:.2f}-{spread[1]:.2f})"


def _share(share: float | None) -> str:
    return "" if share is None else f" ({share:.0%} of the floor's speed)"


def _ratio(stock: float | None, ours: float | None) -> str:
    return "-" if stock is None or ours is None else f"{stock / ours:.2f} x"

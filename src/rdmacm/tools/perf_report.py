"""What ``rdmacm perf`` shows: rows as they are measured, the server's lines, bars, and plots by matplotlib."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rdmacm.errors import RdmaError, cm_error
from rdmacm.tools.measure import size_text
from rdmacm.tools.output import bold
from rdmacm.tools.perf_plan import Op, Plan, Result
from rdmacm.verbs.enums import QPType

#: The endings of the files that :func:`write_plot` writes.
PLOT_ENDINGS = (".svg", ".png", ".pdf")
_LATENCY_LABEL = "us: median, shaded to the 99th percentile"
#: The width of the longest bar, in columns.
_BAR = 40


def what(plan: Plan) -> str:
    """The operation: ``send (UD), both ways``."""
    kind = "" if plan.qp_type is QPType.RC else f" ({plan.qp_type.name})"
    return f"{plan.op.name.lower()}{kind}{', both ways' if plan.bidirectional else ''}"


def _latency_of(plan: Plan) -> str:
    return f"{what(plan)} RTT/2" if plan.op is Op.SEND else what(plan)


def _microseconds(key: str) -> Callable[[Result], str]:
    return lambda result: f"{result.latency_us[key]:.1f}" if result.latency_us else "-"


def _percent(use: float | None) -> str:
    return "-" if use is None else f"{use * 100:.0f}"


def _uses(result: Result) -> str:
    return f"{_percent(result.client_use)}/{_percent(result.server_use)}"


#: The columns of what is known before, by title, and of the figures, with their least width. "lost" is for UC and UD.
_Known = dict[str, Callable[[Plan], str]]
_Figures = dict[str, tuple[int, Callable[[Result], str]]]
_LATENCIES: tuple[_Known, _Figures] = (
    {"latency": _latency_of, "size": lambda p: size_text(p.size), "mode": lambda p: p.mode},
    {
        "count": (7, lambda r: str(r.count)),
        "lost": (4, lambda r: str(r.lost)),
        **{
            f"{key} us": (width, _microseconds(key))
            for key, width in zip(("min", "p50", "p99"), (6, 6, 6), strict=True)
        },
        "max us": (7, _microseconds("max")),
        "cpu c/s": (7, _uses),
    },
)
_BANDWIDTHS: tuple[_Known, _Figures] = (
    {"bandwidth": what, "size": lambda p: size_text(p.size), "depth": lambda p: str(p.depth)},
    {
        "count": (8, lambda r: str(r.count + r.received)),
        "lost": (4, lambda r: str(r.lost)),
        "MB/s": (7, lambda r: f"{r.bytes_per_second / 1e6:.1f}"),
        "Gbit/s": (6, lambda r: f"{r.bytes_per_second * 8 / 1e9:.2f}"),
        "messages/s": (10, lambda r: f"{r.arrived / r.seconds:,.0f}"),
        "cpu c/s": (7, _uses),
    },
)


class Rows:
    """The tables of a run, whose rows are shown as they come. ``plans``: what is going to be measured."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        #: Whether the table that was begun last is of latencies; None before the first.
        self._is_latency: bool | None = None

    def row(self, result: Result) -> str:
        """The line of a result, after the head of its table if that begins with it."""
        begins = result.plan.latency is not self._is_latency
        gap = "\n" if begins and self._is_latency is not None else ""
        self._is_latency = result.plan.latency
        known, figures = _LATENCIES if result.plan.latency else _BANDWIDTHS
        plans = [plan for plan in self._plans if plan.latency is result.plan.latency] or [result.plan]
        if all(plan.qp_type is QPType.RC for plan in plans):
            figures = {title: each for title, each in figures.items() if title != "lost"}
        # Later rows must fit below the head, which is written before they are known.
        widths = {title: max(len(title), *(len(of(plan)) for plan in plans)) for title, of in known.items()}
        head = [title.rjust(width) if title == "depth" else title.ljust(width) for title, width in widths.items()]
        head += [title.rjust(width) for title, (width, _) in figures.items()]
        cells = [
            of(result.plan).rjust(widths[title]) if title == "depth" else of(result.plan).ljust(widths[title])
            for title, of in known.items()
        ]
        cells += [of(result).rjust(width) for width, of in figures.values()]
        return f"{gap}{bold('  '.join(head)) + chr(10) if begins else ''}{'  '.join(cells)}\n"


def server_line(peer: str, plan: Plan, result: Result | None) -> str:
    """The server's line about a client."""
    kind = f"latency, {plan.mode}" if plan.latency else f"depth {plan.depth}"
    head = f"{peer}  {what(plan)} {size_text(plan.size)}, {kind}: "
    if result is None:
        return f"{head}ended without a result\n"
    if result.latency_us:
        figures = f"p50 {result.latency_us['p50']:.1f} us, p99 {result.latency_us['p99']:.1f} us"
    else:
        figures = f"{result.bytes_per_second / 1e6:.1f} MB/s, {result.arrived / result.seconds:,.0f} messages/s"
    lost = f", {result.lost} lost" if plan.qp_type is not QPType.RC else ""
    return (
        f"{head}{result.count + result.received} in {result.seconds:.2f} s{lost}, {figures};"
        f" cpu {_percent(result.server_use)} % here, {_percent(result.client_use)} % there\n"
    )


# -- bars and plots ------------------------------------------------------------------------------------------


def _figure(result: Result) -> float:
    """What is drawn: the median latency in microseconds, or the bandwidth in MB/s."""
    return result.latency_us.get("p50", 0.0) if result.plan.latency else result.bytes_per_second / 1e6


def _name(plan: Plan) -> str:
    return f"{_latency_of(plan)}, {plan.mode}" if plan.latency else what(plan)


def _groups(results: Sequence[Result], *, latency: bool) -> dict[str, list[Result]]:
    """The results that belong together, by name."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.plan.latency is latency:
            found.setdefault(_name(result.plan), []).append(result)
    return found


def bars(results: Sequence[Result]) -> str:
    """The results as bars for the terminal."""
    sign = "█"
    try:
        sign.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        sign = "#"
    lines = []
    for latency, unit in ((True, "us, median"), (False, "MB/s")):
        groups = _groups(results, latency=latency)
        most = max((_figure(result) for group in groups.values() for result in group), default=0) or 1
        for name, group in groups.items():
            lines.append(f"{name}, {unit}")
            for result in group:
                length = round(_figure(result) / most * _BAR)
                lines.append(f"{size_text(result.plan.size):>9}  {_figure(result):9.1f}  {sign * length}".rstrip())
    return "".join(f"{line}\n" for line in lines)


def plot_problem() -> RdmaError | None:
    """The error of a machine that cannot plot; None where it can."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        pass
    else:
        return None
    return cm_error(
        errno.ENOENT, "matplotlib is not installed", "plot", hint="pip install matplotlib, or --plot - for bars"
    )


def write_plot(results: Sequence[Result], path: str) -> None:
    """Write the results as a figure; the ending of the path is its format. An RdmaError if that fails."""
    from matplotlib.figure import Figure

    parts: list[tuple[str, str, dict[str, list[Result]]]] = []
    for latency, label in ((True, _LATENCY_LABEL), (False, "MB/s")):
        groups = _groups(results, latency=latency)
        if groups:
            parts.append(("bytes", label, groups))
    timed = [result for result in results if len(result.intervals) > 1]
    if timed:
        parts.append(
            ("seconds", "MB/s", {f"{_name(each.plan)}, {size_text(each.plan.size)}": [each] for each in timed})
        )
    figure = Figure(figsize=(8, 4 * max(1, len(parts))), layout="constrained")
    for at, (across, label, groups) in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, at + 1)
        for name, group in groups.items():
            if across == "seconds":
                reports = group[0].intervals
                across_values = [report["seconds"] for report in reports]
                axes.plot(across_values, [report["bytes_per_second"] / 1e6 for report in reports], label=name)
                continue
            group = sorted(group, key=lambda result: result.plan.size)
            sizes = [result.plan.size for result in group]
            axes.plot(sizes, [_figure(result) for result in group], marker="o", label=name)
            if group[0].plan.latency and all(result.latency_us for result in group):
                low, high = ([result.latency_us[key] for result in group] for key in ("p50", "p99"))
                axes.fill_between(sizes, low, high, alpha=0.2)
        if across == "bytes":
            axes.set_xscale("log", base=2)
            sizes = sorted({result.plan.size for group in groups.values() for result in group})
            shown = sizes[:: max(1, len(sizes) // 8)]
            axes.set_xticks(shown, [size_text(size) for size in shown])
        else:
            axes.set_xlabel("seconds")
        axes.set_ylabel(label)
        if label == _LATENCY_LABEL:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, format=Path(path).suffix[1:])
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "plot", path) from error

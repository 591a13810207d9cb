"""Swarms of simulations: each seed draws its own mix of work and of faults, and every promise is checked.

    python3 dev.py simulate [--seeds N] [--first SEED] [--jobs N] [--quiet]
    python3 dev.py simulate --replay SEED    run one seed; print the hash of its packet log
    python3 dev.py simulate --script FILE    run a script, as a failing seed prints one

Each seed is one simulated network with three hosts, up to 32 connections, and faults until virtual second 60. After
that the network is whole, and everything has to end. Checked is: each call and connection ends, in success or in an
error that is documented; each work request completes once, in order; no byte is wrong; a connection that no fault
concerns succeeds; every table of each host is bounded, and empty at the end.

A seed that fails is run again in a new process, which must have the same packets, byte by byte. Then steps and faults
are removed as long as it still fails, and the short script is printed.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from support.clock import Stopwatch
from swarm.coverage import Cell, all_cells, record
from swarm.script import Script, draw
from swarm.shrink import shrink
from swarm.world import simulate

__all__ = ["main"]

#: Seeds that one task of a process runs.
_BLOCK = 20
#: Seconds that a failing script may be shortened for, and how many failing seeds are.
_SHRINK_SECONDS = 60.0
_MAX_SHRUNK = 5

_visited: set[Cell] = set()


def _start() -> None:
    record(_visited)
    # A simulation makes many objects and leaves them all at its end: seldom collecting saves a seventh of the time.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def _block(seeds: range) -> tuple[int, int, int, list[tuple[int, str]], set[Cell]]:
    """Run seeds; returns connections, established ones, packets, failures (seed, error), and cells."""
    lives = established = packets = 0
    failures = []
    for seed in seeds:
        try:
            result = simulate(draw(seed), log_limit=0)
        except Exception as error:
            failures.append((seed, _text(error)))
        else:
            lives, established = lives + result.lives, established + result.established
            packets += result.packets
    return lives, established, packets, failures, set(_visited)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kind(error: str) -> str:
    """The words of an error without what differs from run to run."""
    return re.sub(r"[^a-zA-Z]+", " ", re.sub(r"(active|passive) side on \w+", "", error))[:60]


def _run_one(script: Script) -> str:
    """Run a script; returns its line of result."""
    try:
        result = simulate(script)
    except Exception as error:
        return f"{getattr(error, 'digest', '')} {_text(error)}"
    return f"{result.digest} passed: {result.lives} connections, {result.packets} packets, {result.seconds:.3f} s"


def _report(seed: int, error: str, is_shrunk: bool) -> None:
    """Replay a failing seed here and in a new process, shorten it, and print the results."""
    print(f"\nseed {seed}, once more", flush=True)
    command = [sys.executable, "-m", "swarm", "--replay", str(seed)]
    again = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    here = _run_one(draw(seed))
    same = "the same packets" if here == again and error in here else f"OTHER PACKETS than {here}"
    print(f"replay in a new process: {same}\n    {again}")
    if not is_shrunk:
        return
    kind = _kind(error)

    def fails(script: Script) -> bool:
        try:
            simulate(script, log_limit=0)
        except Exception as found:
            return _kind(_text(found)) == kind
        return False

    short = shrink(draw(seed), fails, _SHRINK_SECONDS)
    print(f"short script, for python3 dev.py simulate --script FILE:\n{short}\n    {_run_one(short)}")


def _print_cells(visited: set[Cell]) -> None:
    every = all_cells()
    seen, cells = Counter(cell[0] for cell in visited & every), Counter(cell[0] for cell in every)
    for table in sorted(cells):
        print(f"{table}: {seen[table]} of {cells[table]} cells visited; never:")
        rows: dict[str, list[str]] = {}
        for _, state, trigger in sorted(cell for cell in every - visited if cell[0] == table):
            rows.setdefault(state, []).append(trigger)
        for state, triggers in rows.items():
            print(f"    {state}: {' '.join(triggers)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quiet", action="store_true", help="do not list the cells that were never visited")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--script", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.replay is not None or options.script is not None:
        script = draw(options.replay) if options.script is None else Script.parse(options.script.read_text("utf-8"))
        line = _run_one(script)
        print(line)
        return int(" passed: " not in line)

    watch = Stopwatch()
    end = options.first + options.seeds
    blocks = [range(first, min(first + _BLOCK, end)) for first in range(options.first, end, _BLOCK)]
    totals = [0, 0, 0]
    failures: list[tuple[int, str]] = []
    visited: set[Cell] = set()
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), _start) as pool:
        for number, found in enumerate(pool.map(_block, blocks), 1):
            totals = [total + part for total, part in zip(totals, found[:3], strict=True)]
            failures += found[3]
            for seed, error in found[3]:
                print(f"seed {seed}: {error}", flush=True)
            visited |= found[4]
            if number % 50 == 0:
                print(f"{number * _BLOCK} seeds, {totals[0]} connections, {len(failures)} failures", flush=True)
    took = watch.seconds
    for number, failure in enumerate(failures):
        _report(*failure, number < _MAX_SHRUNK)
    if not options.quiet:
        _print_cells(visited)
    print(
        f"{options.seeds} seeds from {options.first}: {totals[0]} connections, {totals[1]} of them established, "
        f"{totals[2]} packets, {len(failures)} failures; {took:.0f} s, {options.seeds / took:.1f} seeds/s, "
        f"{totals[0] / took:.0f} connections/s"
    )
    return int(bool(failures))

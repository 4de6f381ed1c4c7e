# ruff: noqa: T201 (output is its purpose)
"""Cost of the history: 10, 100 and 1,000 nodes with 30 runs each, and what comparison, outliers and trends take.

    python benchmarks/history_scale.py [NODES...]

The first three runs are saved as validate saves them; the other 27 are copies of the third in the file, because
simulated nodes take longer to make than to save. Each size runs in a process of its own, so that its peak of memory is
its own.
"""

import os
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("tests/fleet", "tests/contract", "tests"))

from fleet_bundles import healthy, uuid

from gpunode.cli.history import trends_of
from gpunode.facts import facts_from_bundle
from gpunode.history.compare import RunOrigin, compare_runs
from gpunode.history.outliers import outliers
from gpunode.history.snapshot import Snapshot, snapshot_of
from gpunode.history.store import BATCH, FILE, History
from gpunode.probe.bundle import Bundle

RUNS, SAVED = 30, 3
COPY_RUN = """
    INSERT INTO runs (name, verb, level, started_at, finished_at, status, version)
    SELECT ?, verb, level, ?, ?, status, version FROM runs WHERE id = ?
"""
COPY_NODES = """
    INSERT INTO nodes (run, host, status, gpus, model, document, measured)
    SELECT ?, host, status, gpus, model, document, measured FROM nodes WHERE run = ?
"""
SHAPE = 1
"""Number of a node with eight H100, eighteen NVLinks each, eight adapters."""
Answer = TypeVar("Answer")


def fleet(base: str, nodes: int, run: int) -> Iterator[Snapshot]:
    """Yield the nodes of a run: no two have the same GPUs, every run has new temperatures and counters."""
    for number in range(nodes):
        text = base.replace(uuid(SHAPE, 0)[:12], uuid(number, 0)[:12]).replace('"bench"', f'"gpu-{number:04d}"')
        node = Snapshot.model_validate_json(text)
        counters = {path: value + run % 7 for path, value in node.counters.items()}
        temperatures = dict.fromkeys(node.idle_temperatures_c, 30.0 + (number + run) % 9)
        yield node.model_copy(update={"counters": counters, "idle_temperatures_c": temperatures})


def timed(what: str, work: Callable[[], Answer]) -> Answer:
    """Return the result of ``work``; print its processor time, seconds and the peak of memory so far."""
    began, used = time.monotonic(), time.process_time()
    answer = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = f"{time.process_time() - used:.1f} s of processor time, {time.monotonic() - began:.1f} s"
    print(f"  {what}: {seconds}, peak {peak:.0f} MiB", flush=True)
    return answer


def measure(base: str, nodes: int) -> None:
    """Fill a history and print the costs."""
    with tempfile.TemporaryDirectory() as folder, History(Path(folder), write=True) as history:

        def fill() -> None:
            for day in range(SAVED):
                run = history.begin("validate", "quick", f"2026-10-{day + 1:02d}T09:00:00Z", "0")
                batch = []
                for node in fleet(base, nodes, day):
                    batch.append((node, "pass", ()))
                    if len(batch) == BATCH:
                        history.add(run, batch)
                        batch = []
                history.add(run, batch)
                history.finish(run, "pass", f"2026-10-{day + 1:02d}T09:05:00Z", "quick")

        def copy() -> None:
            with sqlite3.connect(Path(folder) / FILE) as db:
                for day in range(SAVED, RUNS):
                    at = f"2026-10-{day + 1:02d}T09:00:00Z"
                    run = db.execute(COPY_RUN, (f"copy {day}", at, at, SAVED)).lastrowid
                    db.execute(COPY_NODES, (run, SAVED))

        print(f"{nodes} nodes, {RUNS} runs")
        timed(f"make and save {SAVED} runs", fill)
        copy()
        size = sum(path.stat().st_size for path in Path(folder).glob(f"{FILE}*")) / (1 << 20)
        print(f"  on disk: {size:.1f} MiB")
        origins = (RunOrigin(name="first"), RunOrigin(name="last"))
        found = timed("compare", lambda: compare_runs(history.snapshots(1), history.snapshots(RUNS), origins))
        if len(found.nodes) != nodes:
            raise SystemExit("not every node was compared")
        timed("outliers", lambda: outliers(history.snapshots(RUNS)))
        timed("trends", lambda: trends_of(history))


def main() -> None:
    """Measure the sizes of the command line."""
    base = snapshot_of(facts_from_bundle(Bundle.from_json(healthy(SHAPE, "bench").encode(), "bench"))).model_dump_json()
    for nodes in map(int, sys.argv[1:] or ("10", "100", "1000")):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            measure(base, nodes)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

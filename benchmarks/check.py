"""Is this version slower than an earlier commit?

    python benchmarks/check.py COMMIT [--tasks logistic mlp cnn] [--algorithms fedavg] [--repeats 5]

Both versions run benchmarks/peers/with_flatfed.py as it is in their own tree, in processes that take turns,
so that a machine that is slow for a while is slow for both. A task fails, and the exit code is 1, if the
best round and the median over pairs of neighbouring processes are both slower by more than the tolerance.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import StealTime, refuse_unless_idle
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from programs import ROOT, result, start, write_cohorts

ROUNDS = {"logistic": 300, "mlp": 40, "lenet5": 20, "cnn": 8, "lstm": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--tasks", nargs="+", default=["logistic", "mlp", "cnn"], choices=list(ROUNDS))
    parser.add_argument("--algorithms", nargs="+", default=["fedavg"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--busy", action="store_true", help="measure even while other programs run")
    options = parser.parse_args()
    if not options.busy:
        refuse_unless_idle()
    steal, failed = StealTime(), []
    table = Table("task", "algorithm", "best before, ms", "best now, ms", "ratio", "median ratio of pairs")
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.commit], check=True)
        try:
            cases = list(itertools.product(options.tasks, options.algorithms))
            for task, algorithm in track(cases, "versions in turn", console=Console(stderr=True)):
                cohorts = write_cohorts(Path(folder) / "cohorts.json", task, ROUNDS[task])
                arguments = ["with_flatfed.py", task, str(cohorts), algorithm]
                old: list[list[float]] = []
                new: list[list[float]] = []
                for repeat in range(options.repeats):
                    turn = [(before, old), (ROOT, new)]
                    for tree, seconds in turn if repeat % 2 == 0 else reversed(turn):
                        seconds.append(result(start(arguments, tree=tree))["seconds"])
                best_old, best_new = min(map(min, old)), min(map(min, new))
                pairs = [min(b) / min(a) for a, b in zip(old, new, strict=True)]
                ratio, typical = best_new / best_old, statistics.median(pairs)
                if min(ratio, typical) > 1 + options.tolerance:
                    failed.append(f"{task} with {algorithm}")
                milliseconds = (f"{1000 * best_old:.2f}", f"{1000 * best_new:.2f}")
                table.add_row(task, algorithm, *milliseconds, f"{ratio:.3f}", f"{typical:.3f}")
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    Console().print(table, f"steal time {steal.share():.1%}", sep="\n")
    if failed:
        sys.exit(f"slower than {options.commit} by more than {options.tolerance:.0%}: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Runs the fuzz tests for as long as they are given: `python tests/fuzz/nightly.py [TARGET …] [--minutes 20]`.

Each target is a test of this folder, in a process of its own, whose examples are steered by atheris towards code
that no example has reached yet. The number of examples is printed at the end; an example that breaks the rule ends
the target, is printed by hypothesis, and is kept in hypothesis's folder, so that pytest tries it first from then on.
"""

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGETS = sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))


def fuzz(target: str, minutes: float) -> None:
    import atheris  # of the extra "fuzz"

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    with atheris.instrument_imports(include=["flatfed"]):
        module = importlib.import_module(f"test_{target}")
    tests: list[Any] = [value for name, value in vars(module).items() if name.startswith("test_")]
    runs = [test.hypothesis.fuzz_one_input for test in tests]
    started, last, count, tried = time.monotonic(), 0.0, 0, 0

    def one(data: bytes) -> None:
        nonlocal last, count, tried
        tried += 1
        # All tests of a file take turns.
        if runs[tried % len(runs)](data) is not None:
            count += 1
        elapsed = time.monotonic() - started
        if elapsed > 60 * minutes or elapsed - last > 60:
            last = elapsed
            sys.stderr.write(f"{target}: {count} examples in {elapsed / 60:.1f} min\n")
        if elapsed > 60 * minutes:
            sys.stderr.write(f"{target}: no failure\n")
            sys.stderr.flush()
            # The fuzzer itself knows no end but a failure.
            import os

            os._exit(0)

    # No alarm of the fuzzer's own: the rule sets one.
    atheris.Setup([sys.argv[0], "-timeout=0", "-rss_limit_mb=0", "-max_len=8192", "-verbosity=0"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--here", action="store_true", help="one target in this process")
    options = parser.parse_args()
    if options.here:
        fuzz(options.targets[0], options.minutes)
        return
    failed = []
    for target in options.targets:
        words = [sys.executable, __file__, target, "--here", "--minutes", str(options.minutes)]
        if subprocess.run(words, check=False).returncode:
            failed.append(target)
    if failed:
        sys.exit(f"the rule is broken: {', '.join(failed)}")


if __name__ == "__main__":
    main()

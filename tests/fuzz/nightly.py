"""Runs the fuzz tests for as long as they are given.

    python tests/fuzz/nightly.py [TARGET …] [--minutes 20]

Each target is a file of tests in this folder, run in a process of its own. atheris steers the examples, which
begin as random ones, towards code that none has reached yet. An example that breaks the rule ends its target,
is printed by hypothesis and kept in its database, so that pytest tries it first from then on.
"""

import argparse
import importlib
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STARTS, LONGEST = 200, 4096
"""Random beginnings, and the bytes that one example is made of."""
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
            os._exit(0)  # the fuzzer knows no other end than a failure

    generator = random.Random()
    with tempfile.TemporaryDirectory() as corpus:
        for number in range(STARTS):
            (Path(corpus) / str(number)).write_bytes(generator.randbytes(generator.randrange(64, LONGEST)))
        options = ["-timeout=300", "-rss_limit_mb=0", f"-max_len={LONGEST}", "-verbosity=0", corpus]
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--here", action="store_true", help="one target in this process")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        sys.exit("atheris: not installed; `make fuzz` installs it, or pip install 'flatfed[fuzz]'")
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

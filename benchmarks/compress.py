"""What compressing an upload costs: one encoding and one decoding of a ResNet-18's worth of numbers.

Each time is the best of several on one core: by the clock, and of the processor, which other work on the
machine disturbs less. Ratios are of processor times, to copying the vector once in the same run.

    python benchmarks/compress.py
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from tables import markdown
from torch import Tensor

from flatfed.core.part import Compressor
from flatfed.core.random import torch_generator
from flatfed.parts import ErrorFeedback, ErrorFeedback21, Quantize, Sign, TopK

PARAMETERS = 11_173_962
COMPRESSORS: dict[str, Compressor] = {
    "none": Compressor(),
    "quantize, 2 bits": Quantize(2),
    "quantize, 4 bits": Quantize(4),
    "quantize, 4 bits, max": Quantize(4, norm="max"),
    "quantize, 8 bits": Quantize(8),
    "quantize, 4 bits, one bucket": Quantize(4, None),
    "top_k, 10 %": TopK(0.1),
    "top_k, 1 %": TopK(0.01),
    "sign": Sign(),
    "error feedback, top_k, 10 %": ErrorFeedback(TopK(0.1)),
    "error feedback 21, top_k, 10 %": ErrorFeedback21(TopK(0.1)),
}


class Times(NamedTuple):
    """Seconds of the processor and by the clock."""

    processor: float
    clock: float


Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Times, Result]:
    processor, clock = time.process_time(), time.perf_counter()
    result = work()
    return Times(time.process_time() - processor, time.perf_counter() - clock), result


def best(times: Sequence[Times]) -> Times:
    return Times(min(one.processor for one in times), min(one.clock for one in times))


def measure(compress: Compressor, vector: Tensor, repeats: int) -> tuple[Times, Times, int]:
    """The best encoding, the best decoding, both with what is remembered, and the payload's bytes."""
    encodings, decodings, memory = [], [], 0.001 * vector

    def encode(generator: torch.Generator) -> tuple[Tensor, bytes]:
        target = compress.target(vector, memory)
        return target, compress.encode(target, generator)

    def decode(target: Tensor, payload: bytes) -> None:
        compress.memory(target, compress.decode(payload, len(vector), vector.dtype), memory)

    for number in range(repeats):
        generator = torch_generator(0, "benchmark noise", number)
        encoding, (target, payload) = timed(functools.partial(encode, generator))
        decoding, _ = timed(functools.partial(decode, target, payload))
        encodings.append(encoding)
        decodings.append(decoding)
    return best(encodings), best(decodings), len(payload)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time encoding and decoding of every compressor.")
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vector = 0.01 * torch.randn(options.parameters, generator=torch_generator(0, "benchmark"))
    copy = best([timed(vector.clone)[0] for _ in range(4 * options.repeats)])
    headers = ["encode, ms", "decode, ms", "both by the clock, ms", "both / copy", "bytes", "times smaller"]
    cells = [["compressor", *headers]]
    for name, compress in track(COMPRESSORS.items(), "compressors", console=Console(stderr=True)):
        encoding, decoding, size = measure(compress, vector, options.repeats)
        cells.append(
            [
                name,
                f"{1000 * encoding.processor:.0f}",
                f"{1000 * decoding.processor:.0f}",
                f"{1000 * (encoding.clock + decoding.clock):.0f}",
                f"{(encoding.processor + decoding.processor) / copy.processor:.0f}",
                f"{size:,}",
                f"{vector.nbytes / size:.2f}",
            ]
        )
    sys.stdout.write(
        f"{options.parameters:,} parameters, best of {options.repeats}; one copy takes "
        f"{1000 * copy.processor:.1f} ms\n\n{markdown(cells)}\n"
    )


if __name__ == "__main__":
    main()

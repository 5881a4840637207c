"""Devices: which can be used, how much memory is free there, and how exact their products are."""

import torch

from flatfed.core.errors import FlatfedError, first_line
from flatfed.core.settings import Precision


def usable_device(name: str) -> torch.device:
    if name.partition(":")[0] == "mps":
        raise FlatfedError(
            f"device = {name!r}: it has no float64, in which metrics and running statistics are averaged; "
            "use cpu"
        )
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise FlatfedError(f"device = {name!r}: cannot be used here ({first_line(error)})") from None
    if device.type == "meta":
        raise FlatfedError("device = 'meta': it holds no numbers, so nothing can be trained there; use cpu")
    return device


def free_memory(device: torch.device) -> int | None:
    """Bytes that an accelerator has free at the moment; None where it does not say, and on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return None


def wait_for(device: torch.device) -> None:
    """Returns once an accelerator has done all that it was given, as clocks must."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def described(device: torch.device) -> str:
    """Which one it is, for those who compare measurements."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        name, driver = torch.cuda.get_device_name(device), torch.version.cuda or torch.version.hip
        return f"{device}: {name}, {total / 2**30:.0f} GiB, CUDA {driver}"
    if device.type == "xpu":
        return f"{device}: {torch.xpu.get_device_name(device)}"
    return str(device)


def set_products(precision: Precision, device: torch.device) -> None:
    """How CUDA multiplies in this process from now on, whatever was set: float32 is rounded to TF32 only if
    asked for, and convolutions take algorithms that give the same bits again.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

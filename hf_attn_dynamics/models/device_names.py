# Licensed under the Apache License, Version 2.0.
"""Names of devices, by which measurements on different machines are told apart."""

import platform
from pathlib import Path

import torch


def device_name(device: str | torch.device) -> str:
    """Type and model of a device, such as `cpu (Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz)`."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type != "cpu":
        return device.type
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = (line.partition(":") for line in information.read_text(encoding="utf-8").splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    return f"cpu ({name})"

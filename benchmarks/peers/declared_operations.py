"""Lets torchvision be imported beside the build of torch for processors alone.

fluke imports torchvision, whose only build is for CUDA. Beside another torch it asks whether these operations
exist, and would give up if they did not; nothing in the benchmark calls them.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for operation in ("nms", "qnms"):
    LIBRARY.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""By what a folder knows its own run again."""

from __future__ import annotations

import hashlib
import json
import re

import torch

from flatfed.data.federation import PooledFederation
from flatfed.engines.local import LocalEngine
from flatfed.runs.folder import FREE_SETTINGS


def fingerprint(engine: LocalEngine) -> str:
    """A digest of all that decides a run's numbers: a folder is never continued with something else."""
    plan, federation = engine.plan, engine.federation
    digest = hashlib.sha256()
    settings = plan.settings.model_dump(exclude=FREE_SETTINGS)
    loss = getattr(plan.loss, "__qualname__", repr(plan.loss))
    for text in (plan.algorithm.describe(), settings, plan.path, loss, str(engine.model), len(federation)):
        # Addresses in representations change from process to process.
        digest.update(re.sub(r"0x[0-9a-fA-F]+", "", json.dumps(text)).encode())
    tensors = [engine.initial_vector, *engine.initial_buffers.values()]
    if isinstance(federation, PooledFederation):
        tensors += [federation.inputs, federation.targets, federation.sizes, federation.all_rows]
    else:
        first = federation.client(0)
        tensors += [first.inputs, first.targets]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""RunnerContext: what the parts of one ModelRunner share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.backends.selector import ModelBackend
from engine.models.state import ModelState
from engine.ops.upload import UploadRing
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.sampler import Sampler


@dataclass(frozen=True)
class RunnerContext:
    """One model on one device; slots are those of its state pool and of what requests ask for."""

    model: ModelBackend
    state: ModelState  # of all slots: StatePool.state
    sampler: Sampler
    params: BatchSamplingParams
    processors: LogitsProcessors
    uploads: UploadRing

    @property
    def device(self) -> torch.device:
        """That of the model and of all tensors."""
        return self.uploads.device

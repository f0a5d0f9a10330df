"""RunnerContext: the objects that the parts of one ModelRunner share."""

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
    """One model on one device; slots index its state pool and the requests' parameters."""

    model: ModelBackend
    state: ModelState  # the states of all slots: StatePool.state
    sampler: Sampler
    params: BatchSamplingParams
    processors: LogitsProcessors
    uploads: UploadRing

    @property
    def device(self) -> torch.device:
        """The device of the model and of all tensors."""
        return self.uploads.device

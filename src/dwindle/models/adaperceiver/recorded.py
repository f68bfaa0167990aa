"""AdaPerceiver on a GPU: a forward pass at one setting as one CUDA graph, or with early exit as several (leaving.py).

`AdaPerceiver.run` is the definition of both.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.model import Output
from ...runtime.cuda import recording
from ...runtime.cuda.keep import GRAPHS, Keeper, capture_errors
from .leaving import Leaving
from .settings import Exits, Setting

if TYPE_CHECKING:
    from .model import AdaPerceiver

log = logging.getLogger("dwindle")
Path = Callable[[Tensor, Any], Output]  # images, and the confidence at which they leave


def records(images: Tensor) -> bool:
    """Whether a forward pass on these images can be recorded: they are on the current GPU, and nobody else compiles or
    captures the call."""
    if not images.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return False
    return images.device.index == torch.cuda.current_device()


class Recorder(Keeper["AdaPerceiver"]):
    """Runs a network with fixed weights, and records its forward passes by shape, dtype and setting.

    A setting runs eager the first time, and is recorded the second time, if fewer than `most` others came between. So
    settings that change with every call, or the last, smaller batch of a data set, are not recorded. Early exit is
    recorded at once.
    """

    def __init__(self, model: AdaPerceiver) -> None:
        super().__init__(model)
        self.most = GRAPHS
        self._paths: OrderedDict[tuple, Path | None] = OrderedDict()  # None: the setting came once, and ran eager

    def __call__(
        self,
        images: Tensor,
        tokens: int,
        depth: int,
        width: int,
        exit: float | None = None,
        exits: Exits = None,
    ) -> Output:
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        setting = (tokens, depth, width)
        exit_depths = None if exits is None else tuple(sorted(set(exits)))
        mode = (exit is None, exit_depths, autocast, self.model.attention, self.model.mask)
        key = (images.shape, images.dtype, images.device, setting, *mode)
        path = self._paths.get(key)
        out = None if path is None or exit is not None else path(images, exit)
        if out is None:
            # An exit is a decision that rounding may change, so all calls must round alike: the first one records.
            if path is None and (exit is not None or key in self._paths):
                path = self._record(images, setting, exit is not None, exit_depths)
            out = (path or self._eager(setting, exit_depths))(images, exit)
        self._paths[key] = path
        self._paths.move_to_end(key)
        if len(self._paths) > self.most:
            self._paths.popitem(last=False)
        return out

    def _eager(self, setting: Setting, exit_depths: Exits) -> Path:
        """The forward pass without a recording."""
        return lambda images, exit: self.model.run(images, *setting, exit, exit_depths)

    def _record(self, images: Tensor, setting: Setting, leaving: bool, exit_depths: Exits) -> Path:
        """A recording of the forward pass; eager where it cannot be recorded. leaving: with early exit."""
        try:
            return Leaving(self, images, setting, exit_depths) if leaving else Recorded(self, images, setting)
        except torch.OutOfMemoryError:
            raise
        except capture_errors() as error:
            reason, at = str(error).splitlines()[0], (tuple(images.shape), *setting)
            log.warning("AdaPerceiver cannot be recorded (%s); %s runs eager", reason, at)
            return self._eager(setting, exit_depths)


class Recorded:
    """A forward pass as a CUDA graph, into which images are copied and from which answers are copied."""

    def __init__(self, keeper: Recorder, images: Tensor, setting: Setting) -> None:
        self.lock, model = keeper.lock, keeper.model
        self.held, autocast = recording.held(model), recording.autocast_as_now()

        def forward() -> None:
            with autocast():
                self.out = model.run(self.images, *setting)

        with torch.inference_mode(False), torch.no_grad():  # later images may come from either mode
            self.images = images.clone()
            self.graph = recording.captured(forward, keeper.pool)

    def __call__(self, images: Tensor, exit: None = None) -> Output:
        with self.lock:
            self.images.copy_(images)
            self.graph.replay()
            recorded = self.out.trace  # depends on the setting alone, so it is valid for all images
            trace = replace(recorded, lives=[*recorded.lives], values=[dict(values) for values in recorded.values])
            return Output(self.out.logits.clone(), trace, self.out.features.clone())

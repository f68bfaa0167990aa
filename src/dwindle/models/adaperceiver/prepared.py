"""An AdaPerceiver for weights that stay: on a GPU as CUDA graphs, on a CPU as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.checks import check_finite, check_tensor
from ...core.model import Output
from ...runtime.prepared import Prepared
from .recorded import Recorder, records
from .settings import Choice, Exits, check, settings

if TYPE_CHECKING:
    from .model import AdaPerceiver


class PreparedPerceiver(Prepared):
    """Its arguments are those of `AdaPerceiver`."""

    def __init__(
        self, network: AdaPerceiver, images: int | None = None, details: bool = False, recordings: int | None = None
    ) -> None:
        """recordings: CUDA graphs kept at once. images, details: as `AdaptiveViT.prepare` takes them; nothing depends
        on them here."""
        super().__init__(network)
        self._network: AdaPerceiver = self._model
        self._recorder = Recorder(self._network)
        self._recorder.most = recordings or self._recorder.most

    @torch.no_grad()
    def __call__(
        self,
        images: Tensor,
        tokens: Choice = None,
        depth: Choice = None,
        width: Choice = None,
        exit: float | None = None,
        exits: Exits = None,
        patches: Tensor | None = None,
    ) -> Output:
        network = self._network
        self._check_place(check_tensor(images))
        one = all(given is None or isinstance(given, int) for given in (tokens, depth, width))
        if one and patches is None and records(images):
            (t,), (d,), (w,) = settings(network, tokens, depth, width, 1)
            if exit is not None or exits is not None:  # a recording knows its images' shape, not their threshold
                check(network, images, exit, exits)
            return self._recorder(images, t, d, w, exit, exits)
        out = network.run(images, tokens, depth, width, exit, exits, patches)
        if network.checks and not (images.is_cuda or torch.compiler.is_compiling()):
            check_finite(out.logits, images, self._model)
        return out

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        self._check_place(images)
        return self._network.embed(images)

    def every(
        self,
        images: Tensor,
        width: int | None = None,
        depths: Sequence[int] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        self._check_place(images)
        return self._network.every(images, width, depths, patches)

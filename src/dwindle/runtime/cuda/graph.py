"""The engine: the whole forward pass, halting decisions included, as one CUDA graph per size of batch.

The loop, the method and the read-out are the model's own; only the layout is `Live`. What cannot be recorded (a method
that asks the host) runs as the eager packed path, the definition.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...core.model import Output
from ...core.packed import Packed
from ...ops.launch import available
from ...ops.rows import ACTIVATIONS
from .block import Ready
from .keep import GRAPHS, Keeper, refusals
from .recording import Recording

if TYPE_CHECKING:
    from ...core.model import AdaptiveViT

Path = Callable[[Tensor, "Tensor | None", "Tensor | None"], Output]
log = logging.getLogger("dwindle")


class Engine(Keeper["AdaptiveViT"]):
    """Of a model whose weights nobody writes to any more; only the method's settings may be turned."""

    def __init__(self, model: AdaptiveViT) -> None:
        super().__init__(model)
        self._paths: OrderedDict[tuple, tuple[tuple, Path]] = OrderedDict()  # by size; with the setting it is for
        self._ready = prepared(model)

    def __call__(self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None) -> Output:
        size = self._size(images, depths, operating_point)
        known = self._paths.get(size)
        out = None if known is None else known[1](images, depths, operating_point)
        # The rest is asked while the GPU is at work. An answer by settings that are no longer so is given up.
        setting = self._setting()
        if out is None or known is None or known[0] != setting:
            self.model.check_images(images)
            known = self._paths[size] = setting, self._made(images, depths, operating_point)
            if len(self._paths) > GRAPHS:
                self._paths.popitem(last=False)
            out = known[1](images, depths, operating_point)
        self._paths.move_to_end(size)
        path = known[1]
        if isinstance(path, Recording) and self.model.checks and not path.finite():
            self.model.check_logits(out.logits, images)
        return out

    @staticmethod
    def _size(images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> tuple:
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        shape = (room(len(images)), *images.shape[1:])
        return shape, images.dtype, cast, _for_each(depths, images), _for_each(operating_point, images)

    def inputs(
        self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None
    ) -> list[Tensor | None]:
        """Where the graph for batches like this one reads them, filled with it. A batch that is written there (from the
        host at once, say) and given as these very tensors is not copied again; a call that gives others of this size
        copies them there. Where there is no graph: the tensors given."""
        self(images, depths, operating_point)
        _, path = self._paths[self._size(images, depths, operating_point)]
        places = path.inputs if isinstance(path, Recording) else [images, depths, operating_point]
        return [None if place is None else place[: len(images)] for place in places]

    def path(self, images: Tensor) -> str:
        """What runs a batch like this one."""
        self(images)
        return "graph" if isinstance(self._paths[self._size(images, None, None)][1], Recording) else "packed"

    def _setting(self) -> tuple:
        """The method's plain settings, constants of a recording; its tensors are read where they lie. That a
        warning was given (`told`) changes no answer, and would have each batch recorded anew after the first."""
        given = vars(self.model.method).items()
        return tuple([v for k, v in given if k != "told" and isinstance(v, (bool, int, float, str, tuple))])

    def _made(self, images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Path:
        """A recording wherever one can be made: which it is depends on the machine, the method and the size alone."""

        def eager(images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Output:
            return self.model.run(images, Packed.start, depths, operating_point)

        size = tuple(images.shape)
        if not available(images):
            log.info("engine: no Triton here; %s runs eager, packed", size)
            return eager
        if False in self._size(images, depths, operating_point):  # not as many as there are images: the loop says so
            return eager
        try:
            most = room(len(images))
            given = [None if x is None else _filled(x, most) for x in (depths, operating_point)]
            return Recording(self.model, self._ready, _filled(images, most), given[0], given[1], self.pool, self.turn)
        except torch.OutOfMemoryError:
            raise
        except refusals() as error:
            method, reason = type(self.model.method).__name__, str(error).splitlines()[0]
            log.warning("engine: %s cannot be recorded (%s); %s runs eager, packed", method, reason, size)
            return eager


def room(images: int) -> int:
    """How many images a recording for so many is made for: a power of two, or one and a half. Those that are not there
    are not computed."""
    least = 1 << max(images - 1, 0).bit_length()
    return least * 3 // 4 if least >= 4 and images <= least * 3 // 4 else least


def _filled(x: Tensor, count: int) -> Tensor:
    """With its first row again, until there are so many."""
    return x if len(x) == count else torch.cat([x, x[:1].expand(count - len(x), *x.shape[1:])])


def _for_each(given: Tensor | None, images: Tensor) -> bool | None:
    """Whether there is one for each image: of another shape it must not be spread over a recording that has."""
    return None if given is None else given.shape[:1] == images.shape[:1]


def prepared(model: AdaptiveViT) -> dict[nn.Module, Ready]:
    """The blocks that kernels can run, with their weights folded."""
    ready: dict[nn.Module, Ready] = {}
    foreign = 0
    for block in model.backbone.blocks:
        parts = model.backbone.parts(block)
        if parts is None or parts.act not in ACTIVATIONS or not parts.proj.weight.is_floating_point():
            foreign += 1
            continue
        ready[block] = Ready.of(parts)
    if foreign:
        log.info("engine: %d blocks of %s have no kernels and run whole", foreign, type(model.vit).__name__)
    return ready

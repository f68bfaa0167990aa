"""The model on a smaller image, as a baseline for methods that drop tokens."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import budget_share, static_macs
from ..core.method import Method, Verdict
from ..core.tokens import Tokens
from ..ops.patches import resized
from ..settings import Budget, Within


class Resolution(Method):
    """The static model on a downscaled image. Its position embedding is resampled to the smaller grid of patches.

    The cost is that of the smaller image. Downscaling is not counted, because images can be read at that size.
    """

    needs_training = False
    keeps_prefix = True
    paper = "the wrapped model on a smaller image"

    def __init__(self, scale: Annotated[float, Within(0, 1, over=True)] = 0.75, budget: Budget = None) -> None:
        """
        scale: the factor by which the image's sides are scaled, rounded to whole patches.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `scale` to the size of the nearest cost.
        """
        super().__init__()
        self.scale, self.budget = scale, budget

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        longer = max(shape.grid())
        self.operating_point = ("scale", 1 / longer, 1.0)
        if self.budget is not None:
            goal = budget_share(self.budget, shape)
            self.scale = min(
                (patches / longer for patches in range(1, longer + 1)), key=lambda scale: abs(self._cost(scale) - goal)
            )

    @property
    def config(self) -> dict[str, Any]:
        """The settings, with the scale in use (chosen by the budget, or set later) in place of the budget."""
        return super().config | ({"budget": None} if hasattr(self, "shape") else {})

    def _cost(self, scale: float) -> float:
        return static_macs(self.shape, self.size(self.shape.image, scale)) / static_macs(self.shape)

    def size(self, image: tuple[int, int], scale: float) -> tuple[int, int]:
        """Height and width of an image of this size after downscaling: whole patches, at least one."""
        rows, columns = (max(1, int(scale * patches + 0.5)) for patches in self.shape.grid(image))
        return rows * self.shape.patch[0], columns * self.shape.patch[1]

    def resized_size(self, image: tuple[int, int]) -> tuple[int, int]:
        return self.size(image, self.scale)

    def resize(self, images: Tensor) -> Tensor:
        full = (images.shape[-2], images.shape[-1])
        size = self.resized_size(full)
        return images if size == full else resized(images, size)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        return Verdict(tokens.decide(depth, None))

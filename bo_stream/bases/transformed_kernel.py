"""A kernel of inputs that a learnable transform changes."""

from __future__ import annotations

from typing import Any, Self

from botorch.models.transforms.input import InputTransform
from gpytorch.kernels import Kernel
from torch import Tensor


class TransformedKernel(Kernel):
    """``k(t(x), t(x'))`` with an input transform t whose parameters are the kernel's own.

    A memory of untransformed inputs then follows a learned transform as it follows a lengthscale.

    Attributes:
        base_kernel: k.
        input_transform: t, in evaluation mode always: it learns no bounds from what it is given.
    """

    def __init__(self, base_kernel: Kernel, input_transform: InputTransform) -> None:
        """Put the transform before the kernel; neither is copied.

        Args:
            base_kernel: Of transformed inputs.
            input_transform: One row of each row, whatever the mode.
        """
        super().__init__()
        self.base_kernel = base_kernel
        self.input_transform = input_transform.eval()

    @property
    def is_stationary(self) -> bool:
        """Whether it is a function of differences of inputs: no."""
        return False

    def train(self, mode: bool = True) -> Self:
        """Training mode of all but the transform."""
        super().train(mode)
        self.input_transform.eval()
        return self

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The base kernel at transformed inputs."""
        transform = self.input_transform.transform
        return self.base_kernel(transform(x1), transform(x2), diag=diag, **params)

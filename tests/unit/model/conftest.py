"""What tests of models use."""

from tests.support.kernels.interpreter import looking_once

__all__ = ["looking_once"]

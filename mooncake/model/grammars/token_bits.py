"""Sets of tokens as bits on the host, from which masks of logits are made. Stateless."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def num_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 8)


def bits_of(tokens: Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return these tokens of a vocabulary as uint8 [num_bytes], one bit for each token, the lowest
    first. Bits beyond the vocabulary are 0.
    """
    marks = np.zeros(vocab_size, dtype=np.bool_)
    marks[np.asarray(tokens, dtype=np.int64)] = True
    return torch.from_numpy(np.packbits(marks, bitorder="little"))

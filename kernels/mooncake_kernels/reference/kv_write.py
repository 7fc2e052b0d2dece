"""The cached row of a token: the normed latent and the rotated key part, written to its place in
the pages.
"""

from __future__ import annotations

import torch
from mooncake_kernels.reference.norm import rms_norm
from mooncake_kernels.reference.rope import rotate

FP8_MAX = 448.0


def kv_write(
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Write `[rms_norm(latent) | rotate(key)] / kv_scale` of each row to kv at its place.

    latent: [rows, rank]; key: [rows, rope] with pairs interleaved; both may be strided views of one
    product. rotation: [rows, rope / 2] complex64. places: [rows] int64, page * block_tokens +
    offset; rows with a negative place are skipped (unused rows of a captured step). norm: (weight
    [rank], eps). kv: [pages, block_tokens, rank + rope]; float8_e4m3fn is clamped to +-448.
    """
    turned = rotate(key[:, None], rotation, interleaved=True)[:, 0]
    rows = torch.cat((rms_norm(latent.contiguous(), *norm), turned), dim=-1)
    if kv.dtype == torch.float8_e4m3fn:
        rows = (rows.float() / kv_scale).clamp_(-FP8_MAX, FP8_MAX)
    written, flat = rows.to(kv.dtype), kv.view(-1, kv.shape[-1])
    if kv.dtype == torch.float8_e4m3fn:  # not every torch indexes e4m3: move its bytes
        written, flat = written.view(torch.uint8), flat.view(torch.uint8)
    used = places >= 0
    if not bool(used.all()):
        places, written = places[used], written[used]
    flat.index_copy_(0, places, written)


def query_and_kv(
    query: torch.Tensor,
    query_norm: tuple[torch.Tensor, float],
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Return `rms_norm(query)`, [rows, width], contiguous, and do what `kv_write` does. Both inputs
    come from one product, so one launch can do both.
    """
    kv_write(latent, key, rotation, places, norm, kv, kv_scale)
    return rms_norm(query, *query_norm)

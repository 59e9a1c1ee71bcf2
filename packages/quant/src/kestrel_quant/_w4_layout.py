"""The layout of 4-bit codes in a W4Weight: one for every architecture, in the order of a tensor core's fragments.

Codes 0..15 of a weight [N, K] are int32 words [ceil(N / 16), ceil(K / 64), 32, 4]. A block of 16 rows and 64 columns is
512 bytes, 16 for each lane of a warp. Lane ``4 g + q`` has rows g and g + 8 (r = 0, 1); its word ``j`` has columns
``16 j + 8 p + 2 q + e``: nibble ``4 e + 2 p + r``. That is the fragment A of mma.m16n8k16: register ``2 p + r`` is two
nibbles sixteen bits apart. The word is then rotated by three bits: bits 3 to 6 of a bf16 of 16 are the code of
16 + code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kestrel_runtime.reference import pack_int4, unpack_int4

ROWS, COLUMNS = 16, 64  # of a block


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned codes 0..15 [N, K] as words; rows and columns that complete a block are 0."""
    rows, columns = codes.shape
    codes = F.pad(codes.to(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
    tiles, blocks = codes.shape[0] // ROWS, codes.shape[1] // COLUMNS
    # axes: tile, r, g, block, j, p, q, e
    nibbles = codes.view(tiles, 2, 8, blocks, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 7, 5, 1)
    return _rotated(pack_int4(nibbles.reshape(tiles, blocks, 32, 4, 8)).view(torch.int32).squeeze(-1), 3)


def unpack_codes(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Undo :func:`pack_codes`: uint8 [N, K]."""
    tiles, blocks = words.shape[:2]
    nibbles = unpack_int4(_rotated(words, 29).unsqueeze(-1).view(torch.uint8), signed=False).to(torch.uint8)
    # axes: tile, block, g, q, j, e, p, r
    codes = nibbles.view(tiles, blocks, 8, 4, 4, 2, 2, 2).permute(0, 7, 2, 1, 4, 6, 3, 5)
    return codes.reshape(tiles * ROWS, blocks * COLUMNS)[:rows, :columns]


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words rotated to the left."""
    return words << bits | words >> 32 - bits & (1 << bits) - 1

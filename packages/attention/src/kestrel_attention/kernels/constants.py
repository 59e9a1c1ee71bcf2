"""What the decode kernels and their host code must agree on. Imports without the DSL."""

ARCHS = ("80", "86", "89", "90a", "100f", "120f")
TILE_KEYS = 16  # keys of one matrix product
BLOCK_ROWS = 8  # rows of a thread block: queries x query heads of one KV head
FOLDED_ROWS = 4  # at most, of a thread block whose second terms of weights lie in the columns of further rows
INT4_PAGE = 64  # tokens of a page of an INT4 cache; keys are quantised per channel over a page
COMBINE_SPLITS = 8  # splits that a warp of the combine kernel loads at once
COMBINE_WARPS = 8  # of the combine kernel where there are more splits than that
MIN_SPLIT_TILES = 4  # of keys, of a split in prefill: each has some fixed cost
MAX_SPLITS = 16  # of a block of rows in prefill
SPLIT_ROWS = 128  # rows of a block in prefill, of a sequence whose keys are split
MULTIPROCESSORS = 132  # of the GPU that splits are for
BOX_ROWS = 16  # of keys that TMA loads at once in prefill; a page holds a multiple of them
LARGE_BOX_ROWS = 32  # the same for kernels of larger boxes
# Words of a list of works in prefill, after the counter of works taken. It has two kinds: of one head, and of several.
WORK_COUNT, SPLIT_BLOCK_COUNT = 1, 2
FIRST_COUNT, FIRST_SHIFT = 3, 4  # works of the kind that comes first, and the binary logarithm of their heads
FIRST_WORK = 8  # word of the list from which on each work has two
WARPGROUP_ROWS = 64  # queries of a consumer warpgroup on Hopper
PAST_ALL_BLOCKS = 2**22  # the block of rows of a listed work that has none, in the portable prefill kernel

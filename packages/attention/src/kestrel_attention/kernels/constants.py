"""What the decode kernels and their host code must agree on. Imports without the DSL."""

TILE_KEYS = 16  # keys of one matrix product
BLOCK_ROWS = 8  # rows of a thread block: queries x query heads of one KV head
INT4_PAGE = 64  # tokens of a page of an INT4 cache; keys are quantised per channel over a page
COMBINE_SPLITS = 8  # splits that a warp of the combine kernel loads at once
COMBINE_WARPS = 8  # of the combine kernel where there are more splits than that
MIN_SPLIT_TILES = 4  # of keys, of a split in prefill: each has some fixed cost
BOX_ROWS = 16  # of keys that TMA loads at once in prefill; a page holds a multiple of them

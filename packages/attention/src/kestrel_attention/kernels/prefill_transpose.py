"""Puts e4m3 keys in order and transposes tiles of values, for prefill_fp8.py in calls of many queries.

There the producers of every block of queries transpose values; here it is done once. Keys of a sequence go to a block
of its own, one behind the other. A tile of 128 values of a KV head becomes 128 rows of 128 bytes, the rows and bytes in
the order that the products need; values whose keys do not exist are zeros. A table says which pages exist: -1 where one
does not, else the sequence. A warp has 32 keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import arguments, hopper, pdl, ptx

from .parameters import PrefillScalars, PrefillTensors
from .prefill_base import divide
from .prefill_fp8 import PrefillFp8

THREADS = 128


@dataclass(frozen=True)
class PrefillTranspose(PrefillFp8):
    """One compiled variant. It has the arguments of attention, and three results."""

    def arguments(self) -> tuple[Any, ...]:
        *given, batch, stream = super().arguments()
        batches, rows, kv_heads = (cute.sym_int() for _ in range(3))
        outs = [
            arguments.strided(cutlass.Uint8, batches, rows, kv_heads, self.head_dim, unit=16),
            arguments.strided(cutlass.Uint8, batches, rows, kv_heads, self.key_tile, unit=16),
            arguments.contiguous(Int32, cute.sym_int(), cute.sym_int(), align=None),
        ]
        return (*given, *outs, Int32(1), batch, stream)

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillTensors._fields))
        tensors, scalars = PrefillTensors(*given[:num_tensors]), PrefillScalars(*given[num_tensors:-6])
        mOutK, mOutV, mOutTable, blocks = given[-6:-2]
        self.transposing(tensors, scalars, mOutK, mOutV, mOutTable).launch(
            grid=[blocks, given[-2], 1],
            block=[THREADS, 1, 1],
            stream=given[-1],
            smem=2 * self.tile_bytes,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def transposing(
        self,
        tensors: PrefillTensors,
        scalars: PrefillScalars,
        mOutK: cute.Tensor,
        mOutV: cute.Tensor,
        mOutTable: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, sequence, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        shared = Int32(cute.arch.get_dyn_smem(Float32, alignment=1024).toint())
        loaded, turned = shared, shared + self.tile_bytes
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        kv_heads = tensors.mK.shape[2]
        rPage = cute.make_rmem_tensor(1, Int32)
        keys, _ = self.keys_of(tensors, scalars, sequence, Int32(0))
        works = (keys.held + self.key_tile - 1) // self.key_tile * kv_heads
        index = block
        while index < works:
            tile = divide(index, kv_heads)
            head = index - tile * kv_heads
            keys, _ = self.keys_of(tensors, scalars, sequence, head)
            self.look_up(rPage, keys, tile, warp, lane)
            found = self.locate(keys, rPage, tile, warp, lane)
            self.load_rows(keys, loaded, keys.value_base, found.value, found.exists, warp, lane)
            ptx.cp_async_commit()
            key = tile * self.key_tile + warp * self.loaded_rows + lane
            if head == 0 and keys.has_block_table != 0:
                entry, slot = self.entry_and_slot(keys, key)
                if slot == 0 and Int32(entry) < mOutTable.shape[1]:
                    exists = (found.exists >> cutlass.Uint32(lane)) & 1 != 0
                    mOutTable[sequence, Int32(entry)] = cutlass.select_(exists, sequence, Int32(-1))
            self.copy_keys(keys, mOutK, sequence, head, tile, found, warp, lane)
            ptx.cp_async_wait(0)
            cute.arch.sync_warp()
            source = loaded + self.place_of(self.key_tile, warp * self.loaded_rows + lane, 0)
            self.transpose_rows(source, turned, warp, lane)
            cute.arch.sync_threads()
            to = mOutV.iterator.toint() + Int64(sequence) * mOutV.stride[0] + Int64(head) * mOutV.stride[2]
            for i in cutlass.range_constexpr(self.head_dim * self.key_tile // (16 * THREADS)):
                at = tid + i * THREADS
                row, unit = at // (self.key_tile // 16), at % (self.key_tile // 16)
                words = ptx.load_shared(
                    turned + row * self.key_tile + 16 * (unit ^ hopper.swizzle(self.key_tile, row)), 4
                )
                ptx.store_global(to + Int64(tile * self.head_dim + row) * mOutV.stride[1] + 16 * unit, words)
            cute.arch.sync_threads()
            index += step

    @cute.jit
    def copy_keys(self, keys, mOutK, sequence, head, tile, found, warp, lane):
        """Copy the warp's keys of a tile."""
        row, unit = lane // self.units, lane % self.units
        first = tile * self.key_tile + warp * self.loaded_rows
        to = mOutK.iterator.toint() + Int64(sequence) * mOutK.stride[0] + Int64(head) * mOutK.stride[2] + 16 * unit
        words = []
        count = cutlass.const_expr(self.loaded_rows * self.units // 32)
        for i in cutlass.range_constexpr(count):
            at = cute.arch.shuffle_sync(found.key, row + i * (32 // self.units))
            words.append(ptx.load_global(keys.key_base + 16 * unit + Int64(at) * 16, 4))
        for i in cutlass.range_constexpr(count):
            at = row + i * (32 // self.units)
            if (found.exists >> cutlass.Uint32(at)) & 1 != 0:
                ptx.store_global(to + Int64(first + at) * mOutK.stride[1], words[i])

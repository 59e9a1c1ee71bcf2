// Warpgroup matrix products (wgmma, sm_90a): d [64, N] += a [64, k] times b [N, k] transposed, both in shared memory.
//
// Operands are K-major rows of 128 bytes in the 128-byte swizzle: 16-byte chunk i of row r is stored at chunk i ^ (r %
// 8), and groups of eight rows start at multiples of 1024 bytes. On other architectures than sm_90a every function is
// empty.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KESTREL_HAS_WGMMA 1
#endif

namespace kestrel::ptx {

// Orders this thread's accesses to registers and shared memory before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most `pending` groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
}

// Keeps the compiler from moving accesses to the accumulators across wgmma instructions in flight.
template <int size>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[size]) {
#pragma unroll
  for (int i = 0; i < size; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes completed stores and cp.async writes to shared memory visible to the async proxy: wgmma and bulk copies.
__device__ __forceinline__ void fence_proxy_async() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The descriptor of the rows that start at `address`. Adding 2 to it advances the operand by 32 bytes along K.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62, eight_rows = uint64_t{1024 >> 4} << 32, unused = 1 << 16;
  return swizzle_128 | eight_rows | unused | (address & 0x3ffff) >> 4;
}

// setmaxnreg: lower or raise the number of registers per thread of this warpgroup.
template <int REGISTERS>
__device__ __forceinline__ void reduce_registers() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
#ifdef KESTREL_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// One instruction over 32 bytes of K. Thread t of a warpgroup holds d at row = 16 * (t / 32) + t % 32 / 4 + 8 * r and
// column = 8 * j + 2 * (t % 4) + c in d[4 * j + 2 * r + c], for r, c in {0, 1}. With `add` false d is overwritten.
template <typename T, int N, int SIZE>
__device__ __forceinline__ void wgmma(float (&d)[SIZE], uint64_t a, uint64_t b, bool add) {
  static_assert(N / 2 <= SIZE, "64 * N elements are N / 2 a thread");
#ifdef KESTREL_HAS_WGMMA
// An asm statement spells out its operands. NAMES_n and REGISTERS_n, for N = 8, 16 and 32, list the N / 2 registers of
// d; NAMES_0 to NAMES_3 and REGISTERS_0 to REGISTERS_3 are groups of 32 registers, of which larger N take N / 64.
#define KESTREL_WGMMA(n, k, type, list, a_at, b_at, add_at, tail, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k" k \
               ".f32." type "." type " {" list "}, " a_at ", " b_at ", p, 1, 1" tail ";\n}"                 \
               : __VA_ARGS__                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define KESTREL_WGMMA_TYPES(n, list, a_at, b_at, add_at, ...)                        \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                  \
    KESTREL_WGMMA(n, "16", "bf16", list, a_at, b_at, add_at, ", 0, 0", __VA_ARGS__); \
  } else if constexpr (std::is_same_v<T, __half>) {                                  \
    KESTREL_WGMMA(n, "16", "f16", list, a_at, b_at, add_at, ", 0, 0", __VA_ARGS__);  \
  } else {                                                                           \
    KESTREL_WGMMA(n, "32", "e4m3", list, a_at, b_at, add_at, "", __VA_ARGS__);       \
  }
#define KESTREL_NAMES_8 "%0, %1, %2, %3"
#define KESTREL_REGISTERS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define KESTREL_NAMES_16 KESTREL_NAMES_8 ", %4, %5, %6, %7"
#define KESTREL_REGISTERS_16 KESTREL_REGISTERS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define KESTREL_NAMES_32 KESTREL_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KESTREL_REGISTERS_32                                                                                     \
  KESTREL_REGISTERS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
      "+f"(d[15])
#define KESTREL_NAMES_0                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KESTREL_REGISTERS_0                                                                                   \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define KESTREL_NAMES_1                                                              \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KESTREL_REGISTERS_1                                                                                            \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),          \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),          \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define KESTREL_NAMES_2                                                              \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KESTREL_REGISTERS_2                                                                                            \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), \
      "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),          \
      "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),          \
      "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define KESTREL_NAMES_3                                                                          \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KESTREL_REGISTERS_3                                                                                           \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),         \
      "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
      "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
      "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// The first 8, 16 or 24 registers of such a group.
#define KESTREL_NAMES_1_16 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KESTREL_REGISTERS_1_16                                                                                         \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define KESTREL_NAMES_1_24 KESTREL_NAMES_1_16 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define KESTREL_REGISTERS_1_24                                                                                       \
  KESTREL_REGISTERS_1_16, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), \
      "+f"(d[55])
#define KESTREL_NAMES_2_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define KESTREL_REGISTERS_2_8 \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define KESTREL_NAMES_2_16 KESTREL_NAMES_2_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define KESTREL_REGISTERS_2_16                                                                                      \
  KESTREL_REGISTERS_2_8, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), \
      "+f"(d[79])
#define KESTREL_NAMES_3_8 "%96, %97, %98, %99, %100, %101, %102, %103"
#define KESTREL_REGISTERS_3_8 \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define KESTREL_NAMES_3_16 KESTREL_NAMES_3_8 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define KESTREL_REGISTERS_3_16                                                                               \
  KESTREL_REGISTERS_3_8, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), \
      "+f"(d[110]), "+f"(d[111])
  if constexpr (N == 8) {
    KESTREL_WGMMA_TYPES("8", KESTREL_NAMES_8, "%4", "%5", "%6", KESTREL_REGISTERS_8)
  } else if constexpr (N == 16) {
    KESTREL_WGMMA_TYPES("16", KESTREL_NAMES_16, "%8", "%9", "%10", KESTREL_REGISTERS_16)
  } else if constexpr (N == 32) {
    KESTREL_WGMMA_TYPES("32", KESTREL_NAMES_32, "%16", "%17", "%18", KESTREL_REGISTERS_32)
  } else if constexpr (N == 64) {
    KESTREL_WGMMA_TYPES("64", KESTREL_NAMES_0, "%32", "%33", "%34", KESTREL_REGISTERS_0)
  } else if constexpr (N == 96) {
    KESTREL_WGMMA_TYPES("96", KESTREL_NAMES_0 ", " KESTREL_NAMES_1_16, "%48", "%49", "%50", KESTREL_REGISTERS_0,
                        KESTREL_REGISTERS_1_16)
  } else if constexpr (N == 112) {
    KESTREL_WGMMA_TYPES("112", KESTREL_NAMES_0 ", " KESTREL_NAMES_1_24, "%56", "%57", "%58", KESTREL_REGISTERS_0,
                        KESTREL_REGISTERS_1_24)
  } else if constexpr (N == 128) {
    KESTREL_WGMMA_TYPES("128", KESTREL_NAMES_0 ", " KESTREL_NAMES_1, "%64", "%65", "%66", KESTREL_REGISTERS_0,
                        KESTREL_REGISTERS_1)
  } else if constexpr (N == 144) {
    KESTREL_WGMMA_TYPES("144", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2_8, "%72", "%73", "%74",
                        KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2_8)
  } else if constexpr (N == 160) {
    KESTREL_WGMMA_TYPES("160", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2_16, "%80", "%81", "%82",
                        KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2_16)
  } else if constexpr (N == 192) {
    KESTREL_WGMMA_TYPES("192", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2, "%96", "%97", "%98",
                        KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2)
  } else if constexpr (N == 208) {
    KESTREL_WGMMA_TYPES("208", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2 ", " KESTREL_NAMES_3_8, "%104",
                        "%105", "%106", KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2,
                        KESTREL_REGISTERS_3_8)
  } else if constexpr (N == 224) {
    KESTREL_WGMMA_TYPES("224", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2 ", " KESTREL_NAMES_3_16,
                        "%112", "%113", "%114", KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2,
                        KESTREL_REGISTERS_3_16)
  } else if constexpr (N == 256) {
    KESTREL_WGMMA_TYPES("256", KESTREL_NAMES_0 ", " KESTREL_NAMES_1 ", " KESTREL_NAMES_2 ", " KESTREL_NAMES_3, "%128",
                        "%129", "%130", KESTREL_REGISTERS_0, KESTREL_REGISTERS_1, KESTREL_REGISTERS_2,
                        KESTREL_REGISTERS_3)
  } else {
    static_assert(N == 0, "N is 8, 16, 32, 64, 96, 112, 128, 144, 160, 192, 208, 224 or 256");
  }
#undef KESTREL_NAMES_8
#undef KESTREL_REGISTERS_8
#undef KESTREL_NAMES_16
#undef KESTREL_REGISTERS_16
#undef KESTREL_NAMES_32
#undef KESTREL_REGISTERS_32
#undef KESTREL_NAMES_0
#undef KESTREL_REGISTERS_0
#undef KESTREL_NAMES_1
#undef KESTREL_REGISTERS_1
#undef KESTREL_NAMES_2
#undef KESTREL_REGISTERS_2
#undef KESTREL_NAMES_3
#undef KESTREL_REGISTERS_3
#undef KESTREL_NAMES_1_16
#undef KESTREL_REGISTERS_1_16
#undef KESTREL_NAMES_1_24
#undef KESTREL_REGISTERS_1_24
#undef KESTREL_NAMES_2_8
#undef KESTREL_REGISTERS_2_8
#undef KESTREL_NAMES_2_16
#undef KESTREL_REGISTERS_2_16
#undef KESTREL_NAMES_3_8
#undef KESTREL_REGISTERS_3_8
#undef KESTREL_NAMES_3_16
#undef KESTREL_REGISTERS_3_16
#undef KESTREL_WGMMA_TYPES
#undef KESTREL_WGMMA
#endif
}

}  // namespace kestrel::ptx

// wgmma (see wgmma.cuh) with operand a in registers: d [64, N] += a [64, k] times b [N, k] transposed, over 32 bytes.
//
// Lane 4 * g + q of warp w of the warpgroup holds a at rows 16 * w + g + 8 * r and bytes 16 * p + 4 * q to + 3 of k in
// a[2 * p + r], as for mma.m16n8k16. The registers may be written again after wgmma_wait().
#pragma once

#include <kestrel/ptx/wgmma.cuh>

namespace kestrel::ptx {

// Keeps the compiler from giving registers of a to other values while wgmma instructions in flight read them.
template <int size>
__device__ __forceinline__ void wgmma_fence_registers(uint32_t (&a)[size]) {
#pragma unroll
  for (int i = 0; i < size; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// With `add` false d is overwritten. T is bf16, fp16 or e4m3.
template <typename T, int N, int SIZE>
__device__ __forceinline__ void wgmma_registers(float (&d)[SIZE], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, bool add) {
  static_assert(N / 2 <= SIZE, "64 * N elements are N / 2 a thread");
#ifdef KESTREL_HAS_WGMMA
// NAMES_n and REGISTERS_n list the N / 2 registers of d.
#define KESTREL_WGMMA(n, k, type, list, a_at, b_at, add_at, tail, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k" k \
               ".f32." type "." type " {" list "}, {" a_at "}, " b_at ", p, 1, 1" tail ";\n}"               \
               : __VA_ARGS__                                                                                \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)))
#define KESTREL_WGMMA_TYPES(n, list, a_at, b_at, add_at, ...)                     \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                               \
    KESTREL_WGMMA(n, "16", "bf16", list, a_at, b_at, add_at, ", 0", __VA_ARGS__); \
  } else if constexpr (std::is_same_v<T, __half>) {                               \
    KESTREL_WGMMA(n, "16", "f16", list, a_at, b_at, add_at, ", 0", __VA_ARGS__);  \
  } else {                                                                        \
    static_assert(std::is_same_v<T, __nv_fp8_e4m3>, "T is bf16, fp16 or e4m3");   \
    KESTREL_WGMMA(n, "32", "e4m3", list, a_at, b_at, add_at, "", __VA_ARGS__);    \
  }
#define KESTREL_NAMES_8 "%0, %1, %2, %3"
#define KESTREL_REGISTERS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define KESTREL_NAMES_16 \
  KESTREL_NAMES_8        \
  ", "                   \
  "%4, %5, %6, %7"
#define KESTREL_REGISTERS_16 KESTREL_REGISTERS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define KESTREL_NAMES_32 \
  KESTREL_NAMES_16       \
  ", "                   \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define KESTREL_REGISTERS_32                                                                                     \
  KESTREL_REGISTERS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
      "+f"(d[15])
#define KESTREL_NAMES_64 \
  KESTREL_NAMES_32       \
  ", "                   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KESTREL_REGISTERS_64                                                                                       \
  KESTREL_REGISTERS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), \
      "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),      \
      "+f"(d[31])
#define KESTREL_NAMES_80 \
  KESTREL_NAMES_64       \
  ", "                   \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define KESTREL_REGISTERS_80                                                                                       \
  KESTREL_REGISTERS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
      "+f"(d[39])
#define KESTREL_NAMES_96 \
  KESTREL_NAMES_64       \
  ", "                   \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KESTREL_REGISTERS_96                                                                                       \
  KESTREL_REGISTERS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
      "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),      \
      "+f"(d[47])
#define KESTREL_NAMES_112 \
  KESTREL_NAMES_96        \
  ", "                    \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define KESTREL_REGISTERS_112                                                                                      \
  KESTREL_REGISTERS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), \
      "+f"(d[55])
#define KESTREL_NAMES_128                                                                                          \
  KESTREL_NAMES_64                                                                                                 \
  ", "                                                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KESTREL_REGISTERS_128                                                                                      \
  KESTREL_REGISTERS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
      "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),      \
      "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),      \
      "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),      \
      "+f"(d[63])
#define KESTREL_NAMES_160 \
  KESTREL_NAMES_128       \
  ", "                    \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KESTREL_REGISTERS_160                                                                                       \
  KESTREL_REGISTERS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),       \
      "+f"(d[79])
#define KESTREL_NAMES_192                                                            \
  KESTREL_NAMES_128                                                                  \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KESTREL_REGISTERS_192                                                                                       \
  KESTREL_REGISTERS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),       \
      "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),       \
      "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]),       \
      "+f"(d[95])
#define KESTREL_NAMES_224 \
  KESTREL_NAMES_192       \
  ", "                    \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define KESTREL_REGISTERS_224                                                                                          \
  KESTREL_REGISTERS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), \
      "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]),  \
      "+f"(d[111])
#define KESTREL_NAMES_256                                                                        \
  KESTREL_NAMES_128                                                                              \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KESTREL_REGISTERS_256                                                                                         \
  KESTREL_REGISTERS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),   \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),         \
      "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),         \
      "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]),         \
      "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]),      \
      "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), \
      "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
      "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
      "+f"(d[127])
  if constexpr (N == 8) {
    KESTREL_WGMMA_TYPES("8", KESTREL_NAMES_8, "%4, %5, %6, %7", "%8", "%9", KESTREL_REGISTERS_8)
  } else if constexpr (N == 16) {
    KESTREL_WGMMA_TYPES("16", KESTREL_NAMES_16, "%8, %9, %10, %11", "%12", "%13", KESTREL_REGISTERS_16)
  } else if constexpr (N == 32) {
    KESTREL_WGMMA_TYPES("32", KESTREL_NAMES_32, "%16, %17, %18, %19", "%20", "%21", KESTREL_REGISTERS_32)
  } else if constexpr (N == 64) {
    KESTREL_WGMMA_TYPES("64", KESTREL_NAMES_64, "%32, %33, %34, %35", "%36", "%37", KESTREL_REGISTERS_64)
  } else if constexpr (N == 80) {
    KESTREL_WGMMA_TYPES("80", KESTREL_NAMES_80, "%40, %41, %42, %43", "%44", "%45", KESTREL_REGISTERS_80)
  } else if constexpr (N == 96) {
    KESTREL_WGMMA_TYPES("96", KESTREL_NAMES_96, "%48, %49, %50, %51", "%52", "%53", KESTREL_REGISTERS_96)
  } else if constexpr (N == 112) {
    KESTREL_WGMMA_TYPES("112", KESTREL_NAMES_112, "%56, %57, %58, %59", "%60", "%61", KESTREL_REGISTERS_112)
  } else if constexpr (N == 128) {
    KESTREL_WGMMA_TYPES("128", KESTREL_NAMES_128, "%64, %65, %66, %67", "%68", "%69", KESTREL_REGISTERS_128)
  } else if constexpr (N == 160) {
    KESTREL_WGMMA_TYPES("160", KESTREL_NAMES_160, "%80, %81, %82, %83", "%84", "%85", KESTREL_REGISTERS_160)
  } else if constexpr (N == 192) {
    KESTREL_WGMMA_TYPES("192", KESTREL_NAMES_192, "%96, %97, %98, %99", "%100", "%101", KESTREL_REGISTERS_192)
  } else if constexpr (N == 224) {
    KESTREL_WGMMA_TYPES("224", KESTREL_NAMES_224, "%112, %113, %114, %115", "%116", "%117", KESTREL_REGISTERS_224)
  } else if constexpr (N == 256) {
    KESTREL_WGMMA_TYPES("256", KESTREL_NAMES_256, "%128, %129, %130, %131", "%132", "%133", KESTREL_REGISTERS_256)
  } else {
    static_assert(N == 0, "N is 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224 or 256");
  }
#undef KESTREL_NAMES_8
#undef KESTREL_REGISTERS_8
#undef KESTREL_NAMES_16
#undef KESTREL_REGISTERS_16
#undef KESTREL_NAMES_32
#undef KESTREL_REGISTERS_32
#undef KESTREL_NAMES_64
#undef KESTREL_REGISTERS_64
#undef KESTREL_NAMES_80
#undef KESTREL_REGISTERS_80
#undef KESTREL_NAMES_96
#undef KESTREL_REGISTERS_96
#undef KESTREL_NAMES_112
#undef KESTREL_REGISTERS_112
#undef KESTREL_NAMES_128
#undef KESTREL_REGISTERS_128
#undef KESTREL_NAMES_160
#undef KESTREL_REGISTERS_160
#undef KESTREL_NAMES_192
#undef KESTREL_REGISTERS_192
#undef KESTREL_NAMES_224
#undef KESTREL_REGISTERS_224
#undef KESTREL_NAMES_256
#undef KESTREL_REGISTERS_256
#undef KESTREL_WGMMA_TYPES
#undef KESTREL_WGMMA
#endif
}

}  // namespace kestrel::ptx

// Shows that racecheck reports a false hazard where one lane of a warp releases a pipeline stage for all of them.
//
// A thread fills stages by bulk copies; four warps read them with ldmatrix and plain loads, as experts_fp8_kernel does.
//   0: lane 0 of each warp arrives after __syncwarp(), which orders the other lanes' reads before it. No race.
//   1: every lane arrives. No race either, and the only difference.
//   2: every lane arrives before it reads. A race.
// The sums are compared with the host's. Run each under `compute-sanitizer --tool racecheck`:
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I tools/include -o racecheck_elected_lane FILE
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kestrel;

constexpr int kStages = 3, kSteps = 24, kWarps = 4, kTokens = 16 * kWarps;
constexpr int kRowBytes = 32, kXBytes = kTokens * kRowBytes, kScaleBytes = kTokens * 4;

template <int CASE>
__global__ void pipeline(const char* x, const char* scales, unsigned* sums) {
  __shared__ __align__(128) char x_stage[kStages][kXBytes];
  __shared__ __align__(128) unsigned scale_stage[kStages][kTokens];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, CASE == 0 ? kWarps : 32 * kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  unsigned sum = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int stage = step % kStages, phase = step / kStages % 2;
    if (warp == kWarps) {
      if (lane == 0) {
        ptx::mbarrier_wait(empty + stage, phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + stage, kXBytes + kScaleBytes);
        ptx::bulk_load(ptx::shared_address(x_stage[stage]), x + step * kXBytes, kXBytes, full + stage);
        ptx::bulk_load(ptx::shared_address(scale_stage[stage]), scales + step * kScaleBytes, kScaleBytes, full + stage);
      }
      continue;
    }
    ptx::mbarrier_wait(full + stage, phase);
    if (CASE == 2) ptx::mbarrier_arrive(empty + stage);
    unsigned m[4];
    ptx::load_matrices(ptx::shared_address(x_stage[stage]) + (warp * 16 + lane % 16) * kRowBytes + lane / 16 * 16, m);
    sum += m[0] + m[1] + m[2] + m[3] + scale_stage[stage][warp * 16 + lane / 4] * (lane % 4 == 0);
    sum += scale_stage[stage][warp * 16 + lane / 4 + 8] * (lane % 4 == 0);
    __syncwarp();
    if (CASE == 1 || (CASE == 0 && lane == 0)) ptx::mbarrier_arrive(empty + stage);
  }
  if (warp < kWarps) atomicAdd(sums, sum);
}

int main(int, char** arguments) {
  std::vector<unsigned> x(kSteps * kXBytes / 4), scales(kSteps * kTokens);
  unsigned want = 0, got = 0;
  for (unsigned& word : x) want += word = rand();
  for (unsigned& word : scales) want += word = rand();
  char *x_there, *scales_there;
  unsigned* sum;
  cudaMalloc(&x_there, x.size() * 4);
  cudaMalloc(&scales_there, scales.size() * 4);
  cudaMalloc(&sum, 4);
  cudaMemcpy(x_there, x.data(), x.size() * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(scales_there, scales.data(), scales.size() * 4, cudaMemcpyHostToDevice);
  cudaMemset(sum, 0, 4);
  const int which = atoi(arguments[1]);
  (which == 0   ? pipeline<0>
   : which == 1 ? pipeline<1>
                : pipeline<2>)<<<1, 32 * (kWarps + 1)>>>(x_there, scales_there, sum);
  const cudaError_t error = cudaMemcpy(&got, sum, 4, cudaMemcpyDeviceToHost);
  printf("case %d: %s, sum %s\n", which, cudaGetErrorString(error), got == want ? "right" : "wrong");
  return error != cudaSuccess || got != want;
}

// Launches of dense_wgmma_kernel and stream_linear_kernel. The caller chooses the tile and the cluster
// (src/kestrel_moe/_dense_plan.py).
#include "dense_stream.cuh"
#include "dense_wgmma.cuh"

#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/tensor_map.h>
#include <kestrel/stream_linear.cuh>

#include <algorithm>
#include <atomic>

#include "dense_launch.h"

namespace kestrel::moe {

constexpr int kMaxCluster = 8;
constexpr int kMaxDevices = 64;

// The most clusters of `config` that the current device runs at once. The query takes longer than a launch, so its
// result is cached for each kernel, device and cluster size.
template <auto KERNEL>
int max_active_clusters(const cudaLaunchConfig_t& config, int cluster, DLDevice device) {
  static std::atomic<int> known[kMaxDevices][kMaxCluster + 1];
  const int id = device.device_id;
  if (id < kMaxDevices) {
    const int count = known[id][cluster].load(std::memory_order_relaxed);
    if (count > 0) return count;
  }
  int count = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, KERNEL, &config), "cudaOccupancyMaxActiveClusters");
  count = std::max(count, 1);
  if (id < kMaxDevices) known[id][cluster].store(count, std::memory_order_relaxed);
  return count;
}

template <typename T, typename Tile>
void launch(const LinearParams& linear, ClusterShape cluster, DLDevice device) {
  constexpr auto kernel = dense_wgmma_kernel<T, Tile>;
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  DenseParams p;
  const auto map_x = [&](int rows) {
    return matrix_map(linear.x, bf16, linear.tokens, linear.width, linear.x_stride, rows);
  };
  const auto map_weight = [&](int rows) {
    return matrix_map(linear.weight, bf16, linear.outputs, linear.width, linear.weight_stride, rows);
  };
  const auto tail = [](int size, int box) { return (size % box + 7) / 8 * 8; };
  const int x_rows = Tile::rows / cluster.columns, weight_rows = Tile::columns / cluster.rows;
  p.x = map_x(x_rows);
  p.weight = map_weight(weight_rows);
  p.x_tail = linear.tokens % x_rows ? map_x(tail(linear.tokens, x_rows)) : p.x;
  p.weight_tail = linear.outputs % weight_rows ? map_weight(tail(linear.outputs, weight_rows)) : p.weight;
  p.bias = linear.bias;
  p.residual = linear.residual;
  p.residual_stride = linear.residual_stride;
  p.out = linear.out;
  p.out_stride = linear.out_stride;
  p.tokens = linear.tokens;
  p.outputs = linear.outputs;
  p.steps = divide_up(linear.width, 64);
  p.row_tiles = divide_up(linear.tokens, int64_t{Tile::rows} * cluster.rows);
  p.column_tiles = divide_up(linear.outputs, int64_t{Tile::columns} * cluster.columns);
  p.cluster = cluster;
  p.activation = linear.activation;
  const int64_t tiles = int64_t{p.row_tiles} * p.column_tiles;
  if (tiles > kMaxSize / kMaxCluster) unsupported("more than 2^27 tiles");
  if (cluster.splits > std::min(p.steps, 2)) unsupported("more splits than steps of K");

  raise_shared_limit<kernel, Tile::shared_bytes>(device);
  const int size = cluster.size();
  int64_t clusters = tiles;
  if (cluster.splits == 1) {  // persistent
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size);
    config.blockDim = dim3(Tile::threads);
    config.dynamicSmemBytes = Tile::shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    clusters = std::min<int64_t>(tiles, max_active_clusters<kernel>(config, size, device));
  }
  launch_pdl(kernel, dim3(static_cast<unsigned>(clusters * size)), dim3(Tile::threads), device, p, Tile::shared_bytes,
             size);
}

template <typename T>
void launch_stream(const LinearParams& p, int splits, DLDevice device) {
  const StreamOperands operands{p.x, p.weight, p.x_stride, p.weight_stride, p.tokens, p.outputs, p.width};
  const DenseEpilogue<T> epilogue{p.bias, p.residual, p.out, p.residual_stride, p.out_stride, p.activation};
  launch_stream_linear<T>(operands, epilogue, splits ? splits : stream_splits(p.outputs, p.width), device);
}

// Launches the tile of plan.columns columns; false if it is none of COLUMNS.
template <typename T, Schedule SCHEDULE, int... COLUMNS>
bool launch_columns(const LinearParams& p, const DensePlan& plan, DLDevice device) {
  return ((plan.columns == COLUMNS && (launch<T, DenseTile<COLUMNS, SCHEDULE>>(p, plan.cluster, device), true)) || ...);
}

template <typename T>
void launch_tile(const LinearParams& p, const DensePlan& plan, DLDevice device) {
  if (plan.kernel == DenseKernel::stream) {
    if (!aligned16(p.bias)) unsupported("a bias or results that are no packs of 16 bytes");
    return launch_stream<T>(p, plan.cluster.splits, device);
  }
  const ClusterShape cluster = plan.cluster;
  const auto divides = [](int ctas) { return ctas == 1 || ctas == 2 || ctas == 4; };
  if (!divides(cluster.rows) || !divides(cluster.columns) || cluster.splits > 2)
    unsupported("cluster shapes that do not divide a tile, or more than 2 splits of K");
  if (plan.columns % (8 * cluster.rows)) unsupported("CTAs that share less than 8 rows of the weight");
  if (plan.kernel == DenseKernel::ping_pong) {
    if (cluster.splits == 1 && launch_columns<T, Schedule::ping_pong, 128, 144, 160>(p, plan, device)) return;
  } else if (launch_columns<T, Schedule::cooperative, 64, 96, 112, 128, 144, 160, 192, 208, 224, 256>(p, plan,
                                                                                                      device)) {
    return;
  }
  unsupported("tiles of " + std::to_string(plan.columns) + " columns");
}

void launch_dense_wgmma(const LinearParams& p, const DensePlan& plan, DLDataType dtype, DLDevice device) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) != 9 ||
      device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id) != 0) {
    unsupported("a GPU other than sm_90");
  }
  if (p.width == 0) unsupported("K = 0");
  if (p.outputs % 8) unsupported("results that are no packs of 16 bytes");
  const auto aligned = [](const char* rows, int64_t stride, int count, int64_t bytes) {
    return aligned16(rows) && (count == 1 || (stride % 16 == 0 && stride >= bytes));
  };
  const int64_t in_bytes = int64_t{p.width} * 2, out_bytes = int64_t{p.outputs} * 2;
  if (!aligned(p.x, p.x_stride, p.tokens, in_bytes) || !aligned(p.weight, p.weight_stride, p.outputs, in_bytes) ||
      !aligned(p.out, p.out_stride, p.tokens, out_bytes) ||
      !aligned(p.residual, p.residual_stride, p.tokens, p.residual == nullptr ? 0 : out_bytes)) {
    unsupported("rows that are not aligned to 16 bytes, or overlap");
  }
  if (same_dtype(dtype, kBFloat16)) {
    launch_tile<__nv_bfloat16>(p, plan, device);
  } else if (same_dtype(dtype, kFloat16)) {
    launch_tile<__half>(p, plan, device);
  } else {
    unsupported("float32");
  }
}

}  // namespace kestrel::moe

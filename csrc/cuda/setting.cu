#include <cstring>

#include "cuda/setting.h"
#include "flowtt/batch.h"
#include "flowtt/describe.cuh"
#include "flowtt/number_lookups.cuh"
#include "flowtt/share_tiles.cuh"
#include "flowtt/waves.cuh"

namespace flowtt::cuda {
namespace {

SharedSizes shared_sizes(std::vector<DeviceTable>& tables, int tile_rows, Direction direction) {
  SharedSizes sizes{};
  for (DeviceTable& t : tables) {
    t.max_flows = std::clamp(kMaxLeftRows / t.left_rows, 1, tile_rows);
    const int left_rows = t.max_flows * t.left_rows;
    sizes.left = std::max(sizes.left, left_rows * t.left_pitch);
    sizes.middle = std::max(sizes.middle, t.left_rank4 * t.middle_pitch);
    sizes.c = std::max(sizes.c, left_rows * t.slab_pitch);
    sizes.last = std::max(sizes.last, tile_rows * t.last_pitch);
    if (direction == Direction::kForward) continue;
    sizes.row = std::max(sizes.row, tile_rows * t.row_pitch);
    sizes.kept = std::max(sizes.kept, t.left_rows * t.slab_q * t.rank4);
    if (t.num_cores == 4) sizes.left_gradient = std::max(sizes.left_gradient, left_rows * t.left_pitch);
  }
  return sizes;
}

size_t shared_bytes(const SharedSizes& sizes, int element_bytes, Direction direction) {
  return direction == Direction::kForward ? forward_shared_bytes(sizes, element_bytes)
                                          : backward_shared_bytes(sizes, element_bytes);
}

}  // namespace

void write(const void* data, size_t bytes, void* to, const Context& context) {
  constexpr size_t kPiece = sizeof(DescriptorPiece);
  for (size_t begin = 0; begin < bytes; begin += kPiece) {
    DescriptorPiece piece{};
    const size_t size = std::min(kPiece, bytes - begin);
    std::memcpy(piece.words, static_cast<const char*>(data) + begin, size);
    check(FLOWTT_LAUNCH(write_descriptors, 1, kThreads, 0, context.stream, piece,
                        reinterpret_cast<uint32_t*>(static_cast<char*>(to) + begin), static_cast<int>(size / 4)),
          "write_descriptors");
  }
}

Setting choose_setting(const std::vector<Table>& tables, int element_bytes, Direction direction, size_t limit) {
  Setting setting{};
  setting.slab = kSmallSlab;
  for (size_t i = 0; i < tables.size(); ++i) {
    const DeviceTable t = device_table(tables[i], kLargeSlab, element_bytes, direction);
    if (t.left_rank4 * t.rank4 > kLargeSlab) {
      throw std::runtime_error("flowtt: table number " + std::to_string(i) + " has ranks " +
                               std::to_string(t.left_rank) + " and " + std::to_string(t.rank) +
                               " around its last core but one; the CUDA kernels take products of up to " +
                               std::to_string(kLargeSlab) + ", as of 128 and 128: choose smaller ranks");
    }
    if (t.left_rank4 * t.rank4 * t.middle_q > kSmallSlab) setting.slab = kLargeSlab;
    setting.row_stride = std::max(setting.row_stride, pad4(t.dim));
  }
  int64_t row_cost = 0, flow_cost = 0;
  for (const Table& table : tables) {
    const DeviceTable& t = setting.tables.emplace_back(device_table(table, setting.slab, element_bytes, direction));
    setting.slabs = std::max(setting.slabs, (t.middle_q + t.slab_q - 1) / t.slab_q);
    row_cost += int64_t{t.dim} * t.rank;
    flow_cost += int64_t{t.left_rows} * t.middle_q * t.left_rank * t.rank;
    for (int k = 0; k < t.num_cores; ++k) {
      setting.num_parameters = std::max(setting.num_parameters, t.core_offset[k] + int64_t{t.p[k]} * t.slice_size[k]);
      setting.num_slices = std::max(setting.num_slices, t.slice_offset[k] + t.p[k]);
    }
  }
  const auto average = [&](int64_t sum) {
    return static_cast<int>(std::max<int64_t>(1, sum / static_cast<int64_t>(tables.size())));
  };
  setting.row_cost = average(row_cost);
  setting.flow_cost = average(flow_cost);
  // Two blocks a multiprocessor if that leaves tiles of a reasonable size, else one.
  for (const size_t most : {limit / 2, limit}) {
    for (int rows = kMaxTileRows; rows >= (most < limit ? kMaxTileRows / 2 : 1); rows /= 2) {
      setting.tile_rows = rows;
      setting.sizes = shared_sizes(setting.tables, rows, direction);
      setting.shared_bytes = shared_bytes(setting.sizes, element_bytes, direction);
      if (setting.shared_bytes <= most) return setting;
    }
  }
  throw std::runtime_error("flowtt: the tables need " + std::to_string(setting.shared_bytes) +
                           " bytes of shared memory a block, and this device has " + std::to_string(limit) +
                           "; choose smaller ranks, or factors q of more equal size");
}

LaunchSize launch_size(const std::vector<Table>& tables, int element_bytes, bool backward, size_t shared_limit) {
  const Direction direction = backward ? Direction::kBackward : Direction::kForward;
  const Setting setting = choose_setting(tables, element_bytes, direction, shared_limit);
  return {setting.tile_rows, setting.shared_bytes, setting.slab};
}

DeviceBatch upload(const HostBatch& batch, const std::vector<DeviceTable>& tables, const Context& context) {
  std::vector<DeviceFeature> features;
  for (int64_t f = 0; f < batch.num_features; ++f) {
    const int64_t* const columns = batch.features + f * kFeatureColumns;
    features.push_back({static_cast<int32_t>(columns[kFeatureTable]), static_cast<int32_t>(columns[kFirstColumn])});
  }
  static_assert(sizeof(DeviceTable) % 8 == 0 && sizeof(DeviceFeature) % 4 == 0, "copied in words");
  auto* const to_tables = allocate<DeviceTable>(context, "tables", static_cast<int64_t>(tables.size()));
  auto* const to_features = allocate<DeviceFeature>(context, "features", batch.num_features);
  write(tables.data(), tables.size() * sizeof(DeviceTable), to_tables, context);
  write(features.data(), features.size() * sizeof(DeviceFeature), to_features, context);
  DeviceBatch device{};
  device.tables = to_tables;
  device.features = to_features;
  device.offsets = batch.offsets;
  device.wide_offsets = batch.wide_offsets;
  device.num_tables = static_cast<int32_t>(tables.size());
  device.num_features = static_cast<int32_t>(batch.num_features);
  device.batch_size = static_cast<int32_t>(batch.batch_size);
  device.num_lookups = static_cast<int32_t>(batch.num_lookups);
  device.table_shift = batch.tables[0].table_shift;
  device.total_dim = static_cast<int32_t>(batch.total_dim);
  return device;
}

Schedule share(const Setting& setting, const DevicePlan& plan, unsigned blocks, int leave, const Context& context) {
  const Mapping& mapping = context.mapping;
  const Schedule schedule{allocate<unsigned long long>(context, "tile ranges", blocks),
                          mapping.steal,
                          leave,
                          setting.tile_rows,
                          setting.slabs,
                          setting.row_cost,
                          mapping.by_work ? setting.flow_cost : 0};
  check(FLOWTT_LAUNCH(share_tiles, blocks_for(blocks), kThreads, 0, context.stream, plan, schedule,
                      static_cast<int>(blocks)),
        "share_tiles");
  return schedule;
}

Waves choose_waves(const Setting& setting, int64_t num_lookups, const Context& context) {
  constexpr int64_t kMostWaves = 16;
  const int64_t fit = context.row_bytes / (setting.row_stride * static_cast<int64_t>(sizeof(float)));
  const int64_t rows = std::max({fit, (num_lookups + kMostWaves - 1) / kMostWaves, int64_t{1}});
  if (rows >= num_lookups) return {static_cast<int>(num_lookups), 1};
  const int64_t whole = (rows + kMaxTileRows - 1) / kMaxTileRows * kMaxTileRows;  // tiles
  return {static_cast<int>(whole), static_cast<int>((num_lookups + whole - 1) / whole)};
}

std::vector<DevicePlan> cut(const DevicePlan& plan, Waves waves, const Context& context) {
  std::vector<DevicePlan> plans(static_cast<size_t>(waves.count), plan);
  if (waves.count == 1) return plans;
  auto* const counts = allocate<int64_t>(context, "counts of waves", waves.count * kWaveCounts);
  check(FLOWTT_LAUNCH(cut_waves, blocks_for(waves.count), kThreads, 0, context.stream, plan, waves.rows, waves.count,
                      counts),
        "cut_waves");
  for (int i = 0; i < waves.count; ++i) {
    DevicePlan& wave = plans[static_cast<size_t>(i)];
    wave.begin_row = i * waves.rows;
    wave.row_keys += wave.begin_row;  // [mutant: first-wave-again]
    wave.counts = counts + i * kWaveCounts;
    wave.first_flow = wave.counts + 2;
  }
  return plans;
}

int32_t* number_lookups(const DevicePlan& plan, int64_t num_lookups, const Context& context) {
  auto* const rows = allocate<int32_t>(context, "rows of lookups", num_lookups);
  check(FLOWTT_LAUNCH(flowtt::number_lookups, blocks_for(num_lookups), kThreads, 0, context.stream, plan,
                      static_cast<int>(num_lookups), rows),
        "number_lookups");
  return rows;
}

}  // namespace flowtt::cuda

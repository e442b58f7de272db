// Checks of the ops' arguments. For the binding files only: includes torch's stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/rounding.h"
#include "flowtt/table.h"

namespace flowtt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Args>
void check(bool condition, const Args&... message) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << message);
  throw std::runtime_error(text.str());
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    default:
      return "another type";
  }
}

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i > 0 ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

// Where an argument must be. The emulator's device is the CPU.
enum class Place { kHost, kDevice };

// Checks that an argument is a contiguous tensor of this shape; -1 takes any size.
inline void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape,
                        Place place = Place::kHost) {
#ifdef FLOWTT_CUDA_EMULATION
  place = Place::kHost;
#endif
  if (place == Place::kHost) {
    check(tensor.is_cpu(), name, " must be on the CPU");
  } else {
    check(tensor.is_cuda(), name, " must be on the GPU");
  }
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  std::ostringstream wanted;
  int64_t i = 0;
  for (int64_t size : shape) {
    same = same && (size < 0 || tensor.size(i) == size);
    wanted << (i++ > 0 ? ", " : "");
    size < 0 ? wanted << 'n' : wanted << size;
  }
  check(same, name, " must have shape [", wanted.str(), "], not ", shape_of(tensor));
  check(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_type(const char* name, const Tensor& tensor, ScalarType type) {
  check(tensor.scalar_type() == type, name, " must be ", name_of(type), ", not ", name_of(tensor.scalar_type()));
}

inline std::string text_of(const char* name, const Tensor& tensor) {
  check_shape(name, tensor, {-1});
  check_type(name, tensor, ScalarType::Byte);
  const auto* const text = reinterpret_cast<const char*>(tensor.const_data_ptr<uint8_t>());
  return {text, static_cast<size_t>(tensor.numel())};
}

inline Integers integers(const char* name, const Tensor& tensor, Place place = Place::kHost) {
  check_shape(name, tensor, {-1}, place);
  const ScalarType type = tensor.scalar_type();
  check(type == ScalarType::Int || type == ScalarType::Long, name, " must be int32 or int64, not ", name_of(type));
  return {tensor.const_data_ptr(), type == ScalarType::Long};
}

inline std::vector<Table> read_tables(const Tensor& tables) {
  check_shape("tables", tables, {-1, kTableColumns});
  check_type("tables", tables, ScalarType::Long);
  std::vector<Table> read;
  for (int64_t i = 0; i < tables.size(0); ++i) {
    const Table table = read_table(static_cast<int>(i), tables.const_data_ptr<int64_t>() + i * kTableColumns);
    check(2 <= table.num_cores && table.num_cores <= kMaxCores, "table ", i, " has ", table.num_cores,
          " cores; allowed: 2 to ", kMaxCores);
    check(i == 0 || table.table_shift == read[0].table_shift, "tables differ in their table shift");
    read.push_back(table);
  }
  check(!read.empty(), "tables must have at least one row");
  return read;
}

// Tells layouts apart: a plan carries its own.
inline int64_t fingerprint_of(const Tensor& tables) { return tables.const_data_ptr<int64_t>()[kFingerprint]; }

// Reads the features and the size of the batch, not the offsets.
inline Batch read_batch(const Tensor& features, const Tensor& offsets, int64_t num_lookups, size_t num_tables,
                        Place place = Place::kHost) {
  check_shape("features", features, {-1, kFeatureColumns});
  check_type("features", features, ScalarType::Long);
  const int64_t num_features = features.size(0), bags = offsets.numel() - 1;
  check(num_features > 0, "features must have at least one row");
  const Integers starts = integers("offsets", offsets, place);
  check(bags >= 0 && bags % num_features == 0, "offsets has ", offsets.numel(), " entries; ", num_features,
        " features need ", num_features, " * batch_size + 1");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(num_lookups < kMost && bags < kMost, "a batch of ", num_lookups, " lookups in ", bags,
        " bags is too large; allowed are fewer than ", kMost, " of each: split the batch");
  const Batch batch{num_features, bags / num_features, num_lookups, features.const_data_ptr<int64_t>(), starts};
  for (int64_t feature = 0; feature < num_features; ++feature) {
    const int64_t table = batch.table(feature);
    check(0 <= table && table < static_cast<int64_t>(num_tables), "feature ", feature, " names table ", table,
          "; allowed: 0 to ", num_tables - 1);
  }
  return batch;
}

inline Flow read_flow(int64_t number) {
  check(0 <= number && number <= 2, "flow must be 0 (prefix), 1 (unique) or 2 (direct), not ", number);
  return static_cast<Flow>(number);
}

inline BoundsCheckMode read_bounds_check_mode(int64_t number) {
  check(0 <= number && number <= 2, "bounds_check_mode must be 0 (fatal), 1 (warning) or 2 (ignore), not ", number);
  return static_cast<BoundsCheckMode>(number);
}

inline PoolingMode read_pooling_mode(int64_t number) {
  check(0 <= number && number <= 1, "pooling_mode must be 0 (sum) or 1 (mean), not ", number);
  return static_cast<PoolingMode>(number);
}

// A flow plan as the ops hand it on.
struct PlanTensors {
  Tensor lookups, bags, row_keys, row_starts, flow_starts, counts;

  // Calls body(name, tensor, size, type) for each, of a plan of n lookups.
  template <class Body>
  void for_each(int64_t n, const Body& body) {
    body("lookups", lookups, n, ScalarType::Int);
    body("bags", bags, n, ScalarType::Int);
    body("row_keys", row_keys, n, ScalarType::Long);
    body("row_starts", row_starts, n + 1, ScalarType::Int);
    body("flow_starts", flow_starts, n + 1, ScalarType::Int);
    body("counts", counts, 4, ScalarType::Long);
  }
  FlowPlanBuffers buffers() {
    return {lookups.mutable_data_ptr<int32_t>(), bags.mutable_data_ptr<int32_t>(), row_keys.mutable_data_ptr<int64_t>(),
            row_starts.mutable_data_ptr<int32_t>(), flow_starts.mutable_data_ptr<int32_t>()};
  }
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> result() const {
    return {lookups, bags, row_keys, row_starts, flow_starts, counts};
  }
};

// Elements of the weights that the tables describe.
inline int64_t num_parameters(const std::vector<Table>& tables) {
  int64_t parameters = 0;
  for (const Table& table : tables) {
    for (int k = 0; k < table.num_cores; ++k) {
      parameters = std::max(parameters, table.core_offset[k] + table.p[k] * table.slice_size(k));
    }
  }
  return parameters;
}

// Checks that the features' columns are within the output's.
inline void check_columns(const Batch& batch, const std::vector<Table>& tables, int64_t total_dim) {
  for (int64_t feature = 0; feature < batch.num_features; ++feature) {
    const int64_t end = batch.column(feature) + tables[static_cast<size_t>(batch.table(feature))].dim;
    check(batch.column(feature) >= 0 && end <= total_dim, "feature ", feature, " has columns up to ", end,
          " of an output of ", total_dim);
  }
}

inline Optimizer read_optimizer(int64_t number, double beta1, double beta2) {
  check(0 <= number && number <= 3, "optimizer must be 0 (SGD), 1 (Adagrad), 2 (row-wise Adagrad) or 3 (Adam), not ",
        number);
  const auto optimizer = static_cast<Optimizer>(number);
  if (optimizer == Optimizer::kAdam) {
    check(0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1, "beta1 and beta2 must be at least 0 and below 1, not ",
          beta1, " and ", beta2);
  }
  return optimizer;
}

// The number of each table's step; 0 where steps are not counted.
inline std::vector<int64_t> read_steps(const std::optional<Tensor>& steps, Optimizer optimizer, size_t num_tables) {
  if (!steps) {
    check(optimizer != Optimizer::kAdam, "steps must be given for Adam");
    return std::vector<int64_t>(num_tables, 0);
  }
  check_shape("steps", *steps, {static_cast<int64_t>(num_tables)});
  check_type("steps", *steps, ScalarType::Long);
  const int64_t* const first = steps->const_data_ptr<int64_t>();
  for (size_t i = 0; i < num_tables; ++i) {
    check(first[i] >= 1, "steps must be at least 1, not ", first[i], " for table ", i);
  }
  return {first, first + num_tables};
}

// What a table's step does. Each has its own random bits, `rounding_seed` being those of step 0.
template <class T>
UpdateRule<T> update_rule(Optimizer optimizer, double learning_rate, double eps, double weight_decay, double beta1,
                          double beta2, int64_t step, int64_t rounding_seed) {
  // What Adam divides an average of `step` values by, which began at 0 and decays by `beta`.
  const auto correction = [step](double beta) { return static_cast<T>(1 - std::pow(beta, static_cast<double>(step))); };
  return {optimizer,
          static_cast<T>(learning_rate),
          static_cast<T>(eps),
          static_cast<T>(weight_decay),
          static_cast<T>(beta1),
          static_cast<T>(beta2),
          correction(beta1),
          correction(beta2),
          rounding_seed < 0 ? rounding_seed : (rounding_seed + step) % kRoundingSeeds};
}

template <class T>
std::vector<UpdateRule<T>> update_rules(Optimizer optimizer, double learning_rate, double eps, double weight_decay,
                                        double beta1, double beta2, const std::vector<int64_t>& steps,
                                        int64_t rounding_seed) {
  std::vector<UpdateRule<T>> rules;
  rules.reserve(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    // Most tables have made as many steps as their neighbour, and powers take time.
    rules.push_back(i > 0 && steps[i] == steps[i - 1] ? rules.back()
                                                      : update_rule<T>(optimizer, learning_rate, eps, weight_decay,
                                                                       beta1, beta2, steps[i], rounding_seed));
  }
  return rules;
}

// Elements that an optimizer's momenta have; 0 where it has none.
struct MomentumSizes {
  int64_t first, second;
};

// Checks that the momenta which the optimizer has are given, and no others.
inline MomentumSizes momentum_sizes(Optimizer optimizer, const std::optional<Tensor>& momentum1,
                                    const std::optional<Tensor>& momentum2, int64_t parameters,
                                    const std::vector<Table>& tables) {
  const bool has_first = optimizer != Optimizer::kSgd, has_second = optimizer == Optimizer::kAdam;
  check(momentum1.has_value() == has_first, "momentum1 must be given for Adagrad, row-wise Adagrad and Adam only");
  check(momentum2.has_value() == has_second, "momentum2 must be given for Adam, and for it only");
  int64_t slices = 0;
  for (const Table& table : tables) {
    for (int k = 0; k < table.num_cores; ++k) slices = std::max(slices, table.slice_offset[k] + table.p[k]);
  }
  return {!has_first ? 0 : optimizer == Optimizer::kRowwiseAdagrad ? slices : parameters, has_second ? parameters : 0};
}

}  // namespace flowtt

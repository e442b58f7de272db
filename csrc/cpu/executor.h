// How kernels get their threads: explicit task numbers, run by whatever pool the caller has.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

namespace flowtt::cpu {

// The parts of the ops whose times benchmarks tell apart. Slices that a task has alone are updated in kFlows.
enum class Stage { kKeys, kSort, kGroup, kRows, kPooling, kFlows, kCores };
constexpr int64_t kNumStages = 7;

// Runs numbered tasks. Work is cut by task number, never by thread, so results depend on `num_threads` alone.
struct Executor {
  int num_threads;
  // Calls body(0) .. body(num_tasks - 1), in any order and in parallel, and returns when all are done.
  std::function<void(int64_t num_tasks, const std::function<void(int64_t)>& body)> run_tasks;

  // Where to add up the seconds of stages, [kNumStages], if anyone wants them.
  double* stage_seconds = nullptr;
  mutable std::chrono::steady_clock::time_point lap_start = {};

  // Adds the time since the last lap, or since the start of the op, to a stage.
  void lap(Stage stage) const {
    if (stage_seconds == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    stage_seconds[static_cast<int>(stage)] += std::chrono::duration<double>(now - lap_start).count();
    lap_start = now;
  }

  void run(int64_t num_tasks, const std::function<void(int64_t)>& body) const {
    if (num_tasks == 1) {
      body(0);
    } else if (num_tasks > 1) {
      run_tasks(num_tasks, body);
    }
  }

  // As many tasks as there are threads, but none with fewer than `grain` items.
  int64_t num_tasks(int64_t items, int64_t grain) const {
    const int64_t most = items / grain;
    return most < 1 ? 1 : most < num_threads ? most : num_threads;
  }
};

// Where task `task` of `num_tasks` starts when `items` are shared out evenly.
inline int64_t even_cut(int64_t items, int64_t task, int64_t num_tasks) { return items * task / num_tasks; }

}  // namespace flowtt::cpu

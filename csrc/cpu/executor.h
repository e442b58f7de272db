// How kernels get their threads: explicit task numbers, run by whatever pool the caller has.
#pragma once

#include <cstdint>
#include <functional>

namespace flowtt::cpu {

// Runs numbered tasks. Work is cut by task number, never by thread, so results depend on `num_threads` alone.
struct Executor {
  int num_threads;
  // Calls body(0) .. body(num_tasks - 1), in any order and in parallel, and returns when all are done.
  std::function<void(int64_t num_tasks, const std::function<void(int64_t)>& body)> run_tasks;

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

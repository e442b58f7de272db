// Pooled rows of a batch whose flow plan is known.
#pragma once

#include "cpu/executor.h"
#include "cpu/lookup.h"

namespace flowtt::cpu {

// Writes all of `output` [batch_size, total_dim].
template <class T>
void pooled_forward(const Executor& executor, const Lookup<T>& lookup, T* output);

}  // namespace flowtt::cpu

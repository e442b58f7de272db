// Gradients of the pooled lookup, kept or applied at once.
#pragma once

#include "cpu/executor.h"
#include "cpu/gradient_sink.h"
#include "cpu/lookup.h"

namespace flowtt::cpu {

// Hands the gradient of every slice that the batch touches to `sink`; all are taken at the weights before the call,
// even when the sink changes these. `grad_output` is [batch_size, total_dim]. Unless null, `grad_per_sample_weights`
// [num_lookups] is written.
template <class T>
void pooled_backward(const Executor& executor, const Lookup<T>& lookup, const T* grad_output,
                     const GradientSink<T>& sink, T* grad_per_sample_weights);

}  // namespace flowtt::cpu

// What the ops are called with: the same for the CPU's and the GPU's kernels.
#pragma once

namespace flowtt {

template <class Library>
void define_ops(Library& m) {
  m.def(
      "flow_plan(Tensor tables, Tensor table_names, Tensor features, Tensor indices, Tensor offsets, int flow, "
      "int bounds_check_mode) -> (Tensor lookups, Tensor bags, Tensor row_keys, Tensor row_starts, "
      "Tensor flow_starts, Tensor counts)");
  // The plan's counts, once it is known to be one of these tables, features and offsets.
  m.def(
      "check_plan(Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags, Tensor row_keys, "
      "Tensor row_starts, Tensor flow_starts, Tensor counts) -> Tensor");
  m.def(
      "pooled_forward(Tensor weights, Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags, "
      "Tensor row_keys, Tensor row_starts, Tensor flow_starts, Tensor counts, Tensor? per_sample_weights, "
      "int total_dim, int pooling_mode) -> Tensor");
  m.def(
      "pooled_backward(Tensor grad_output, Tensor weights, Tensor tables, Tensor features, Tensor offsets, "
      "Tensor lookups, Tensor bags, Tensor row_keys, Tensor row_starts, Tensor flow_starts, Tensor counts, "
      "Tensor? per_sample_weights, int pooling_mode, bool per_sample_weights_grad) "
      "-> (Tensor grad_weights, Tensor grad_per_sample_weights)");
  // steps: int64 on the CPU, for each table the number of this step, from 1.
  m.def(
      "pooled_backward_update(Tensor grad_output, Tensor(a!) weights, Tensor(b!)? momentum1, "
      "Tensor(c!)? momentum2, Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags, "
      "Tensor row_keys, Tensor row_starts, Tensor flow_starts, Tensor counts, Tensor? per_sample_weights, "
      "int pooling_mode, bool per_sample_weights_grad, int optimizer, float learning_rate, float eps, "
      "float weight_decay, float beta1, float beta2, Tensor? steps, int rounding_seed) -> Tensor");
  m.def(
      "cuda_setting(Tensor tables, bool backward, int shared_limit, int element_bytes) "
      "-> (int tile_rows, int shared_bytes, int slab)");  // how the kernels of these tables are launched
  m.def("raise_cuda_fault() -> ()");  // what the current device has found wrong with a batch, if anything
  m.def("use_cuda_mapping(bool by_work, bool steal, bool handover=True) -> ()");  // for ablations
  m.def("use_cuda_row_bytes(int most) -> ()");     // memory for rows and for their gradients
  m.def("use_deterministic_cuda(bool on) -> ()");  // mirrors torch.use_deterministic_algorithms
  m.def("use_cuda_tf32(bool on) -> ()");           // mirrors torch.backends.cuda.matmul.fp32_precision
}

}  // namespace flowtt

// Registers the functions of these names in namespace flowtt as the ops' kernels.
#define FLOWTT_IMPLEMENT_OPS(m)                                   \
  m.impl("flow_plan", TORCH_BOX(&flowtt::flow_plan));             \
  m.impl("check_plan", TORCH_BOX(&flowtt::check_plan));           \
  m.impl("pooled_forward", TORCH_BOX(&flowtt::pooled_forward));   \
  m.impl("pooled_backward", TORCH_BOX(&flowtt::pooled_backward)); \
  m.impl("pooled_backward_update", TORCH_BOX(&flowtt::pooled_backward_update))

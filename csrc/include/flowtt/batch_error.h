// A batch that the ops cannot take, and how that is said: by the CPU's ops at once, by the GPU's in a later call.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace flowtt {

struct BatchError {
  enum Kind : int32_t { kWrongEnds, kFall, kOutOfRange, kWrongPlan };
  Kind kind;
  int32_t feature, table;  // of a row number
  int64_t position;        // of the row number, or of the offset that the next one is below
  int64_t value;           // that row number or offset; the first offset if the ends are wrong
  int64_t next;            // the next offset, or the last
  int64_t limit;           // rows of the table, or number of row numbers
};

// why: which part of the plan shows it.
[[noreturn]] inline void raise_wrong_plan(const std::string& why, const char* remark = "") {
  throw std::runtime_error(
      "the flow plan is not one of this layout and these offsets, or it has been changed since it was made: " + why +
      ". Make a plan of this batch with flow_plan" + remark);
}

// table_names: joined by newlines. remark: what is said too.
[[noreturn]] inline void raise_batch_error(const BatchError& error, const std::string& table_names,
                                           const char* remark = "") {
  if (error.kind == BatchError::kWrongPlan) raise_wrong_plan("its arrays do not fit together", remark);
  std::ostringstream text;
  if (error.kind == BatchError::kWrongEnds) {
    text << "offsets must start at 0 and end at the number of indices, " << error.limit << ", but go from "
         << error.value << " to " << error.next << remark;
    throw std::runtime_error(text.str());
  }
  if (error.kind == BatchError::kFall) {
    text << "offsets must not decrease, but offsets[" << error.position << "] = " << error.value << " and offsets["
         << error.position + 1 << "] = " << error.next << remark;
    throw std::runtime_error(text.str());
  }
  std::istringstream names(table_names);
  std::string name;
  for (int32_t i = 0; i <= error.table; ++i) std::getline(names, name);
  text << "index " << error.value << " at position " << error.position << " (feature " << error.feature << ", table '"
       << name << "') is out of range; allowed: 0 to " << error.limit - 1 << remark;
  throw std::out_of_range(text.str());  // IndexError in Python
}

}  // namespace flowtt

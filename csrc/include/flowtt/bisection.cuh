// Searching what is in order.
#pragma once

#include "flowtt/platform.cuh"

namespace flowtt {

// The last of the numbers 0 ... count - 1 for which `holds`, which does for the first ones, and for 0 whatever it says.
template <class Int, class Holds>
FLOWTT_INLINE Int last_where(Int count, const Holds& holds) {
  Int low = 0;
  for (Int high = count; low + 1 < high;) {
    const Int middle = low + (high - low) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace flowtt

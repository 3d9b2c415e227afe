// Which CUDA device is the calling thread's current one.
#pragma once

#include "flashgla/base/dtype.h"

namespace flashgla {

// While this lives the device is the current one, and afterwards the one before is again: what allocates, queues or
// synchronises changes it, and a library's callers have things of their own to do on theirs. Nothing on the CPU, and
// where the device is not there, which is for its users to say.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;  // none: it was current
};

}  // namespace flashgla

// What LibTorch's header of its Gloo backend needs of Gloo. LibTorch's wheels have Gloo's code but
// not its headers. These declare the functions that LibTorch's libraries export, and no layout: no
// object of these classes is made, copied or destroyed by this library.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {

class Context {
 public:
  void closeConnections();
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class UnboundBuffer;
}

}  // namespace gloo

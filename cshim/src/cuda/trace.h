// Shared with recordings by the rest of the library.
#pragma once

namespace ts {

// The name of the node that runs the nodes of a backward pass. A recording leaves out its two
// events: they would enclose the events of the nodes, which show what the pass did.
inline constexpr char kPassNode[] = "torchstream::PassNode";

}  // namespace ts

// What recordings know of the rest of the library.
#pragma once

namespace ts {

// The name of the node that runs the nodes of a backward pass. A recording leaves its two events
// out: they would surround those of the nodes, which say what the pass did.
inline constexpr char kPassNode[] = "torchstream::PassNode";

}  // namespace ts

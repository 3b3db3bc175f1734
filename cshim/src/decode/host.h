// The kernels' work, done on the host.
#pragma once

#include "decode/inflate.h"
#include "decode/launch.h"

namespace ts::decode {

// Runs a stage, inflates or gathers before it returns. All memory is the host's.
void run_on_host(Stage stage, const Work& work);
void run_on_host(const InflateWork& work);
void run_on_host(const GatherWork& work);

}  // namespace ts::decode

// The kernels' work, done on the host.
#pragma once

#include "decode/inflate.h"
#include "decode/launch.h"
#include "decode/read.h"

namespace ts::decode {

// Runs a stage, inflates, gathers or reads before it returns. All memory is the host's.
void run_on_host(Stage stage, const Work& work);
void run_on_host(const InflateWork& work);
void run_on_host(const GatherWork& work);
void run_on_host(const ReadWork& work);

}  // namespace ts::decode

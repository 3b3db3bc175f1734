// LibTorch's header of its Gloo backend includes this file and uses nothing of it (see context.h).
#pragma once

// Empty: LibTorch's headers for the host include it and name nothing of it.
#pragma once

// Empty: LibTorch's headers for the host include it but use no name from it.
#pragma once

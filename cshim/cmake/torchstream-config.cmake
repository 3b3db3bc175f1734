# torchstream::image, and torchstream::torchstream where LibTorch's part is installed.
include(${CMAKE_CURRENT_LIST_DIR}/torchstream-image-targets.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/torchstream-targets.cmake OPTIONAL)

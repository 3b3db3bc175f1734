// How the camera was held: the orientation that EXIF data says.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

// 1 to 8 as in EXIF; 1 also if there is none, or one that cannot be read: a picture is not damaged
// because its notes are. The format is one of TS_IMAGE_; data has its signature.
int32_t exif_orientation(int32_t format, const uint8_t* data, size_t bytes);

// What turns an image stored with the given orientation upright: pixel (x, y) of the upright image
// of upright_width x upright_height is the stored image's pixel (*x, *y) afterwards.
void stored_place(int32_t orientation, int32_t upright_width, int32_t upright_height, int32_t* x,
                  int32_t* y);

}  // namespace ts::image

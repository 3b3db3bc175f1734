// Reads the camera's orientation from metadata.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

// Returns the EXIF orientation, 1 to 8, from EXIF data (in a PNG also EXIF data as text, "Raw
// profile type exif"), or else from an XMP packet, in the order of Pillow's exif_transpose. Returns
// 1 if there is none, or if it cannot be read, because damaged metadata does not make the picture
// damaged. Allocates at most 3 MiB, for compressed text in a PNG. format is a TS_IMAGE_FORMAT_
// value, and data starts with that format's signature.
int32_t exif_orientation(int32_t format, const uint8_t* data, size_t bytes);

// Converts the position (*x, *y) of a pixel in the upright image, of upright_width x upright_height
// pixels, to the position of that pixel in the image as stored with the given orientation.
void stored_place(int32_t orientation, int32_t upright_width, int32_t upright_height, int32_t* x,
                  int32_t* y);

}  // namespace ts::image

// The headers of a JPEG that a plan needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
// jpeglib.h needs cstdio before it.
#include <jpeglib.h>

#include "image/jpeg_entropy.h"
#include "jpeg/plan.h"

namespace ts::image {

struct Frame {
  struct Component {
    int32_t width, height;       // samples, without padding of the last blocks
    int across, down;            // blocks in an MCU
    int h, v;                    // sampling factors
    const uint16_t* quantisers;  // 64, in natural order
  };

  int32_t width, height;
  int max_h, max_v;  // of the sampling factors
  int components;
  jpeg::Color color;
  Component component[kMaxComponents];
};

// Reads the frame from libjpeg, which has started to decompress an image of at most three
// components. The frame borrows the quantisers. Returns false for an image that cannot have a plan.
bool frame_of(const jpeg_decompress_struct& codec, Frame* frame);

// The tables of an image.
struct Tables {
  HuffmanCode codes[2][4];  // of DC differences, and of the other coefficients
  uint16_t quantisers[4][64];
};

// Reads the headers of a baseline JPEG as libjpeg-turbo does, about eight times as fast. Returns
// false for a file whose headers are damaged or unusual: libjpeg-turbo then reads them. The frame
// and the scan borrow the tables. file_bytes: the file's size; data needs only the first bytes,
// with the headers.
bool read_frame(const uint8_t* data, size_t bytes, size_t file_bytes, Tables* tables, Frame* frame,
                Scan* scan);

}  // namespace ts::image

// Decodes a whole JPEG with libjpeg and ignores its warnings: the expected result for tolerated
// damage.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <vector>
// jpeglib.h needs cstdio before it.
#include <jpeglib.h>

namespace libjpeg_whole {

struct Codec {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  std::jmp_buf jump;
};

// Fills pixels with RGB rows without gaps. Returns false if libjpeg fails, or the image has four
// components. libjpeg's errors jump, so no frame below this one owns anything.
inline bool decode(const uint8_t* data, size_t bytes, std::vector<uint8_t>* pixels) {
  Codec state;
  jpeg_decompress_struct* codec = &state.codec;
  codec->err = jpeg_std_error(&state.errors);
  codec->client_data = &state;
  state.errors.emit_message = [](j_common_ptr, int) {};
  state.errors.error_exit = [](j_common_ptr failed) {
    std::longjmp(static_cast<Codec*>(failed->client_data)->jump, 1);
  };
  if (setjmp(state.jump) != 0) {
    jpeg_destroy_decompress(codec);
    return false;
  }
  jpeg_create_decompress(codec);
  jpeg_mem_src(codec, data, static_cast<unsigned long>(bytes));
  jpeg_read_header(codec, TRUE);
  if (codec->num_components == 4) {
    jpeg_destroy_decompress(codec);
    return false;
  }
  codec->out_color_space = JCS_RGB;
  jpeg_start_decompress(codec);
  const size_t stride = size_t{codec->output_width} * 3;
  pixels->assign(stride * codec->output_height, 0);
  while (codec->output_scanline < codec->output_height) {
    JSAMPROW row = pixels->data() + codec->output_scanline * stride;
    jpeg_read_scanlines(codec, &row, 1);
  }
  jpeg_destroy_decompress(codec);
  return true;
}

}  // namespace libjpeg_whole

/* A thumbnail with libtorchstream_image alone: no LibTorch is linked or loaded.
 *
 *   thumbnail PICTURE > small.ppm      the whole picture, 64 pixels a side
 */
#include <stdio.h>
#include <stdlib.h>
#include <torchstream_image.h>

enum { SIDE = 64, MAX_BYTES = 64 << 20 };

static int fail(ts_error* error) {
  fprintf(stderr, "thumbnail: %s: %s\n", ts_error_origin(error), ts_error_message(error));
  ts_error_free(error);
  return 1;
}

int main(int argc, char** argv) {
  FILE* file = argc == 2 ? fopen(argv[1], "rb") : NULL;
  uint8_t* data = malloc(MAX_BYTES);
  if (file == NULL || data == NULL) {
    fprintf(stderr, "usage: thumbnail PICTURE > small.ppm\n");
    return 2;
  }
  const size_t bytes = fread(data, 1, MAX_BYTES, file);
  fclose(file);

  ts_error* error = NULL;
  ts_image_info info = {.size = sizeof info};
  if ((error = ts_image_get_info(data, bytes, &info)) != NULL) return fail(error);
  ts_image_decoder* decoder = NULL;
  if ((error = ts_image_decoder_new(0, &decoder)) != NULL) return fail(error);
  static uint8_t pixels[SIDE * SIDE * 3];
  const ts_image_geometry geometry = {
      .size = sizeof geometry,
      .crop_width = info.width,
      .crop_height = info.height,
      .resize_width = SIDE,
      .resize_height = SIDE,
      .window_width = SIDE,
      .window_height = SIDE,
  };
  if ((error = ts_image_decode(decoder, data, bytes, &geometry, pixels, SIDE * 3)) != NULL) {
    return fail(error);
  }
  ts_image_decoder_free(decoder);
  free(data);
  printf("P6\n%d %d\n255\n", SIDE, SIDE);
  return fwrite(pixels, 1, sizeof pixels, stdout) == sizeof pixels ? 0 : 1;
}

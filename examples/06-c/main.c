/* Streams and images from C: decodes a picture with libtorchstream_image, then moves it to a GPU
 * on one stream and computes with it on another, ordered by an event.
 *
 *   06-c PICTURE      a JPEG, PNG or WebP file
 *
 * Without a GPU the second half is skipped. README.md says how it is built.
 */
#include <stdio.h>
#include <stdlib.h>
#include <torchstream.h>

enum { SIDE = 64 };

/* Ends the program if a call failed. Every function that can fail returns its error. */
static void check(ts_error* error) {
  if (error == NULL) return;
  fprintf(stderr, "06-c: %s: %s\n", ts_error_origin(error), ts_error_message(error));
  ts_error_free(error);
  exit(1);
}

static uint8_t* read_file(const char* path, size_t* bytes) {
  FILE* file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
    perror(path);
    exit(1);
  }
  const long size = ftell(file);
  uint8_t* data = size > 0 ? malloc((size_t)size) : NULL;
  rewind(file);
  if (data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size) {
    fprintf(stderr, "06-c: %s: cannot be read\n", path);
    exit(1);
  }
  fclose(file);
  *bytes = (size_t)size;
  return data;
}

/* Resizes the whole picture to SIDE x SIDE RGB pixels. */
static void decode(const char* path, uint8_t* pixels) {
  size_t bytes = 0;
  uint8_t* data = read_file(path, &bytes);

  ts_image_info info = {.size = sizeof info};
  check(ts_image_get_info(data, bytes, &info));

  ts_image_decoder* decoder = NULL;
  check(ts_image_decoder_new(0, &decoder));
  const ts_image_geometry geometry = {
      .size = sizeof geometry,
      .crop_width = info.width,
      .crop_height = info.height,
      .resize_width = SIDE,
      .resize_height = SIDE,
      .window_width = SIDE,
      .window_height = SIDE,
  };
  check(ts_image_decode(decoder, data, bytes, &geometry, pixels, SIDE * 3));
  ts_image_decoder_free(decoder);
  free(data);

  double sum[3] = {0, 0, 0};
  for (int i = 0; i < SIDE * SIDE * 3; ++i) sum[i % 3] += pixels[i];
  const double count = SIDE * SIDE;
  printf("%s: %d x %d pixels, mean colour %.1f %.1f %.1f\n", path, info.width, info.height,
         sum[0] / count, sum[1] / count, sum[2] / count);
}

/* Copies the pixels to the GPU on one stream and normalises them on another. */
static void on_gpu(const uint8_t* pixels) {
  const size_t bytes = (size_t)SIDE * SIDE * 3;
  const int64_t nhwc[] = {1, SIDE, SIDE, 3};
  const int64_t nchw[] = {1, 3, SIDE, SIDE};
  ts_stream copies;
  ts_stream work;
  check(ts_stream_from_pool(0, 0, &copies));
  check(ts_stream_from_pool(0, 0, &work));

  /* An asynchronous copy needs pinned memory. */
  ts_pinned* pinned = NULL;
  ts_tensor* host = NULL;
  ts_tensor* raw = NULL;
  ts_tensor* images = NULL;
  check(ts_pinned_new(bytes, &pinned));
  for (size_t i = 0; i < bytes; ++i) ts_pinned_data(pinned)[i] = pixels[i];
  check(ts_tensor_from_memory(ts_pinned_data(pinned), bytes, nhwc, 4, TS_DTYPE_UINT8, &host));
  check(ts_tensor_new(nhwc, 4, TS_DTYPE_UINT8, 0, TS_MEMORY_FORMAT_CONTIGUOUS, &raw));
  check(ts_tensor_new(nchw, 4, TS_DTYPE_FLOAT32, 0, TS_MEMORY_FORMAT_CONTIGUOUS, &images));
  /* Both were allocated on the default stream, which the other two do not wait for by themselves.
   */
  ts_stream allocated;
  check(ts_stream_get_default(0, &allocated));
  check(ts_stream_fork(allocated, (const ts_stream[]){copies, work}, 2));

  ts_event* ready = NULL;
  check(ts_event_new(0, &ready));
  check(ts_tensor_copy_batch(copies, NULL, &raw, &host, 1, ready));

  /* Work that uses the copy waits for it on the device; the host goes on. */
  ts_stream_guard guard;
  const float mean[] = {0.485F, 0.456F, 0.406F};
  const float std[] = {0.229F, 0.224F, 0.225F};
  check(ts_stream_wait_event(work, ready));
  check(ts_stream_guard_enter(work, &guard));
  check(ts_tensor_normalize_images(images, raw, mean, std, 3));
  check(ts_stream_guard_exit(guard));
  check(ts_stream_synchronize(work));

  float first = 0;
  float* values = malloc(bytes * sizeof *values);
  if (values == NULL) exit(1);
  check(ts_tensor_read(images, (uint8_t*)values, bytes * sizeof *values));
  first = values[0];
  free(values);
  printf("first pixel's red after normalisation on the GPU: %.4f, expected %.4f\n", first,
         (pixels[0] / 255.0F - mean[0]) / std[0]);

  ts_event_free(ready);
  ts_tensor_free(images);
  ts_tensor_free(raw);
  ts_tensor_free(host);
  check(ts_pinned_destroy(pinned));
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: 06-c PICTURE\n");
    return 2;
  }
  if (ts_abi_version() != TS_ABI_VERSION || ts_image_abi_version() != TS_IMAGE_ABI_VERSION) {
    fprintf(stderr, "06-c: the libraries are of another version than their headers\n");
    return 1;
  }
  uint8_t* pixels = malloc((size_t)SIDE * SIDE * 3);
  if (pixels == NULL) return 1;
  decode(argv[1], pixels);
  if (ts_device_count() > 0) {
    on_gpu(pixels);
  } else {
    printf("no usable GPU: the streams are skipped\n");
  }
  free(pixels);
  return 0;
}

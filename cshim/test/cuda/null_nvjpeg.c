/* A libnvjpeg.so.13 for the null devices of null_runtime.cc, whose memory is host memory. It
 * decodes nothing: for each image of a batch it writes the first and the last byte. It refuses
 * calls that nvJPEG forbids: a batch of another size than at the initialisation, rows that are too
 * narrow, two calls at a time with one state. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

enum {
  OK = 0,
  INVALID_PARAMETER = 2,
  BAD_JPEG = 3,
  INTERNAL_ERROR = 8,
  GPU_HYBRID = 2,
  HARDWARE = 3,
  RGB_INTERLEAVED = 5
};

typedef struct image {
  unsigned char* channel[4];
  size_t pitch[4];
} image;

typedef struct handle {
  int backend;
} handle;

typedef struct state {
  handle* owner;
  int batch;
  atomic_int busy;
} state;

typedef struct header {
  int progressive;
} header;

static atomic_int live;
static atomic_int decoded;

/* For tests: the number of objects created and not destroyed, and of images decoded. */
int null_nvjpeg_live(void) { return live; }
int null_nvjpeg_decoded(void) { return decoded; }

/* Returns the last byte of the frame marker of a JPEG with 3 components, or 0. */
static int frame(const unsigned char* data, size_t bytes, int* width, int* height) {
  size_t at = 2;
  if (bytes < 4 || data[0] != 0xFF || data[1] != 0xD8) return 0;
  while (at + 10 <= bytes && data[at] == 0xFF) {
    const int marker = data[at + 1];
    if (marker == 0xC0 || marker == 0xC2) {
      *height = data[at + 5] << 8 | data[at + 6];
      *width = data[at + 7] << 8 | data[at + 8];
      return data[at + 9] == 3 ? marker : 0;
    }
    at += 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
  }
  return 0;
}

int nvjpegCreateEx(int backend, void* device_memory, void* host_memory, unsigned flags,
                   handle** made) {
  if ((backend != GPU_HYBRID && backend != HARDWARE) || device_memory || host_memory || flags)
    return INVALID_PARAMETER;
  *made = calloc(1, sizeof **made);
  (*made)->backend = backend;
  ++live;
  return OK;
}
int nvjpegDestroy(handle* h) {
  free(h);
  --live;
  return OK;
}
int nvjpegGetHardwareDecoderInfo(handle* h, unsigned* engines, unsigned* cores) {
  *engines = 7;
  *cores = 1;
  return h->backend == HARDWARE ? OK : INVALID_PARAMETER;
}
int nvjpegJpegStateCreate(handle* h, state** made) {
  *made = calloc(1, sizeof **made);
  (*made)->owner = h;
  ++live;
  return OK;
}
int nvjpegJpegStateDestroy(state* s) {
  free(s);
  --live;
  return OK;
}
int nvjpegJpegStreamCreate(handle* h, header** made) {
  *made = calloc(1, sizeof **made);
  ++live;
  return h ? OK : INVALID_PARAMETER;
}
int nvjpegJpegStreamDestroy(header* parsed) {
  free(parsed);
  --live;
  return OK;
}
int nvjpegJpegStreamParse(handle* h, const unsigned char* data, size_t bytes, int metadata,
                          int keep, header* parsed) {
  int width, height;
  const int found = frame(data, bytes, &width, &height);
  (void)h;
  (void)metadata;
  (void)keep;
  parsed->progressive = found == 0xC2;
  return found ? OK : BAD_JPEG;
}
int nvjpegDecodeBatchedSupported(handle* h, header* parsed, int* unsupported) {
  *unsupported = h->backend == HARDWARE && parsed->progressive;
  return OK;
}
int nvjpegGetImageInfo(handle* h, const unsigned char* data, size_t bytes, int* components,
                       int* subsampling, int* widths, int* heights) {
  (void)h;
  *components = 3;
  *subsampling = 0;
  return frame(data, bytes, widths, heights) ? OK : BAD_JPEG;
}
int nvjpegDecodeBatchedInitialize(handle* h, state* s, int batch, int max_threads, int format) {
  if (s->owner != h || batch < 1 || max_threads < 1 || format != RGB_INTERLEAVED)
    return INVALID_PARAMETER;
  s->batch = batch;
  return OK;
}
int nvjpegDecodeBatched(handle* h, state* s, const unsigned char* const* data, const size_t* bytes,
                        image* to, void* stream) {
  if (s->owner != h || s->batch < 1 || stream == NULL) return INVALID_PARAMETER;
  if (atomic_exchange(&s->busy, 1)) return INTERNAL_ERROR;
  for (int i = 0; i < s->batch; ++i) {
    int width, height;
    const int found = frame(data[i], bytes[i], &width, &height);
    if (!found || (found == 0xC2 && h->backend == HARDWARE)) return BAD_JPEG;
    if (to[i].pitch[0] < (size_t)width * 3) return INVALID_PARAMETER;
    to[i].channel[0][0] = 1;
    to[i].channel[0][to[i].pitch[0] * (size_t)height - 1] = 1;
    ++decoded;
  }
  s->busy = 0;
  return OK;
}

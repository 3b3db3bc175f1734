/* Random numbers: LibTorch's generators. */
#ifndef TS_RANDOM_H_
#define TS_RANDOM_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Seeds every device's default generator. On a machine with a GPU it returns TS_ERROR_CAPTURE
 * inside a capture and TS_ERROR_BUSY during another thread's capture, and then seeds no generator.
 */
TS_API ts_error* ts_random_seed(uint64_t seed);

/* Returns the state of the device's default generator, as new bytes on the CPU, equal to PyTorch's
 * get_rng_state. The state takes replays of graphs into account. For a GPU it returns
 * TS_ERROR_CAPTURE inside a capture and TS_ERROR_BUSY during another thread's capture. */
TS_API ts_error* ts_random_get_state(int32_t device, ts_tensor** state);

/* Replaces the state of the device's default generator. The bytes are copied. Fails like
 * ts_random_get_state. */
TS_API ts_error* ts_random_set_state(int32_t device, const ts_tensor* state);

/* A generator of random numbers on one device, for TS_ARG_KIND_GENERATOR. An operator locks it
 * while it draws. Any number of threads may use it at once. A graph keeps the generators that its
 * operators draw from: each replay draws the next numbers. Functions that read or set a GPU's
 * generator return TS_ERROR_CAPTURE inside a capture and TS_ERROR_BUSY during another thread's
 * capture. */
typedef struct ts_generator ts_generator;

/* Makes a generator with a seed. */
TS_API ts_error* ts_generator_new(int32_t device, uint64_t seed, ts_generator** generator);

/* Returns a handle to the device's default generator, which operators use if they get none. */
TS_API ts_error* ts_generator_new_default(int32_t device, ts_generator** generator);
TS_API void ts_generator_free(ts_generator* generator);
TS_API ts_error* ts_generator_get_seed(const ts_generator* generator, uint64_t* seed);

/* Sets the seed, and resets the offset to 0. */
TS_API ts_error* ts_generator_set_seed(ts_generator* generator, uint64_t seed);

/* Returns the number of random numbers that each thread of a kernel has drawn since the seed was
 * set. Returns TS_ERROR_OPERATOR on the CPU, whose generator has no offset. */
TS_API ts_error* ts_generator_get_offset(const ts_generator* generator, uint64_t* offset);

/* Sets the offset, which must be a multiple of 4. */
TS_API ts_error* ts_generator_set_offset(ts_generator* generator, uint64_t offset);

/* Returns the state, like ts_random_get_state. */
TS_API ts_error* ts_generator_get_state(const ts_generator* generator, ts_tensor** state);
TS_API ts_error* ts_generator_set_state(ts_generator* generator, const ts_tensor* state);

#ifdef __cplusplus
}
#endif

#endif /* TS_RANDOM_H_ */

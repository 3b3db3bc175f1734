/* Random numbers: LibTorch's generators. */
#ifndef TS_RANDOM_H_
#define TS_RANDOM_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Seeds every device's default generator. With a GPU TS_ERROR_CAPTURE in a capture, and
 * TS_ERROR_BUSY beside one; no generator is then seeded. */
TS_API ts_error* ts_random_seed(uint64_t seed);

/* Returns the state of the device's default generator: new bytes on the CPU, which PyTorch's
 * get_rng_state returns too. Replays of a graph count. For a GPU, TS_ERROR_CAPTURE in a capture,
 * and TS_ERROR_BUSY beside one. */
TS_API ts_error* ts_random_get_state(int32_t device, ts_tensor** state);

/* Replaces the state of the device's default generator. The bytes are copied. Fails as
 * ts_random_get_state. */
TS_API ts_error* ts_random_set_state(int32_t device, const ts_tensor* state);

/* A generator of random numbers on one device, for TS_ARG_KIND_GENERATOR. An operator locks it
 * while it draws. Any number of threads may use it at once. A capture whose operators draw from
 * generators keeps them: each replay draws the numbers that follow. The functions that read or set
 * one of a GPU are TS_ERROR_CAPTURE in a capture, and TS_ERROR_BUSY beside one. */
typedef struct ts_generator ts_generator;

/* Makes a generator with a seed. */
TS_API ts_error* ts_generator_new(int32_t device, uint64_t seed, ts_generator** generator);

/* Returns a handle to the device's default generator, which operators use without an argument. */
TS_API ts_error* ts_generator_new_default(int32_t device, ts_generator** generator);
TS_API void ts_generator_free(ts_generator* generator);
TS_API ts_error* ts_generator_get_seed(const ts_generator* generator, uint64_t* seed);

/* Sets the seed, and the offset to 0. */
TS_API ts_error* ts_generator_set_seed(ts_generator* generator, uint64_t seed);

/* Returns how many numbers each thread of a kernel has drawn since the seed. TS_ERROR_OPERATOR on
 * the CPU, whose generator has no offset. */
TS_API ts_error* ts_generator_get_offset(const ts_generator* generator, uint64_t* offset);

/* Sets the offset, a multiple of 4. */
TS_API ts_error* ts_generator_set_offset(ts_generator* generator, uint64_t offset);

/* Returns the state, as ts_random_get_state does for a default generator. */
TS_API ts_error* ts_generator_get_state(const ts_generator* generator, ts_tensor** state);
TS_API ts_error* ts_generator_set_state(ts_generator* generator, const ts_tensor* state);

#ifdef __cplusplus
}
#endif

#endif /* TS_RANDOM_H_ */

/* Included by every header of torchstream: integer types, and TS_API, which marks exported
 * functions. */
#ifndef TS_API_H_
#define TS_API_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A program may define TS_API itself, for example if it defines the functions as jumps into a
 * library that it opens at run time. */
#if !defined(TS_API)
#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif
#endif

#endif /* TS_API_H_ */

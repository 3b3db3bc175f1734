/* What every header of torchstream needs: integer types, and the mark of exported functions. */
#ifndef TS_API_H_
#define TS_API_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A program that defines the functions itself, as jumps into a library that it opens, may define
 * TS_API. */
#if !defined(TS_API)
#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif
#endif

#endif /* TS_API_H_ */

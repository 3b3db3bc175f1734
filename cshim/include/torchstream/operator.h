/* Operators: calls through LibTorch's dispatcher. */
#ifndef TS_OPERATOR_H_
#define TS_OPERATOR_H_

#include "torchstream/error.h"
#include "torchstream/numerics.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An entry of LibTorch's dispatcher, valid for the life of the process. Any number of threads may
 * use it at once. */
typedef struct ts_operator ts_operator;

/* Finds an operator. name: for example "aten::add". overload: for example "Tensor", or "" for none.
 * The result is cached. Returns TS_ERROR_NOT_FOUND if there is none. */
TS_API ts_error* ts_operator_find(const char* name, const char* overload, const ts_operator** op);

/* Returns the schema, for example "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1)
 * -> Tensor". Valid for the life of the process. */
TS_API const char* ts_operator_schema(const ts_operator* op);

/* How an argument's value is read. */
enum {
  TS_ARG_KIND_DEFAULT = 0, /* the schema's default; an error if it has none */
  TS_ARG_KIND_NONE = 1,    /* an absent optional */
  TS_ARG_KIND_TENSOR = 2,  /* index into tensors */
  TS_ARG_KIND_TENSORS =
      3,               /* Tensor[]: count tensors from this index on; Tensor?[]: NULL means none */
  TS_ARG_KIND_INT = 4, /* int, dtype, layout, memory format, SymInt, and Scalar */
  TS_ARG_KIND_DOUBLE = 5,   /* float, and Scalar: the bit pattern of a double */
  TS_ARG_KIND_BOOL = 6,     /* 0 or 1; also Scalar */
  TS_ARG_KIND_INTS = 7,     /* int[], SymInt[], Scalar[]: count values of ints from this index on */
  TS_ARG_KIND_DOUBLES = 8,  /* float[], Scalar[]: the same, bit patterns of doubles */
  TS_ARG_KIND_BOOLS = 9,    /* bool[], Scalar[]: the same, 0 or 1 */
  TS_ARG_KIND_DEVICE = 10,  /* Device: the device index */
  TS_ARG_KIND_STRING = 11,  /* str: count bytes of text from this offset on */
  TS_ARG_KIND_COMPLEX = 12, /* Scalar: bit patterns of two doubles in ints, from this index on */
  TS_ARG_KIND_GENERATOR = 13 /* Generator: the address of a ts_generator, borrowed for the call */
};

/* One argument. The narrow count keeps it at 16 bytes. */
typedef struct ts_arg {
  int32_t kind; /* TS_ARG_KIND_ */
  int32_t count;
  int64_t value;
} ts_arg;

/* The arguments of a call except its tensors. Passing them by value costs no more than flat
 * parameters. ints and text may be NULL when no argument refers to them. */
typedef struct ts_arguments {
  const ts_arg* args; /* in the schema's order; missing arguments get their defaults */
  int64_t arg_count;
  const int64_t* ints;
  int64_t int_count;
  const char* text;
  size_t text_bytes;
} ts_arguments;

enum {
  TS_OPERATOR_FLAG_NO_GRAD = 1, /* under LibTorch's NoGradGuard: autograd records nothing */
  /* Under LibTorch's autocast with this lower precision, for operands on the CPU and on a GPU. The
   * two flags exclude each other. The cache of cast weights is off: its entries would outlive an
   * update of the weight, and no call knows where a forward pass ends. */
  TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16 = 2,
  TS_OPERATOR_FLAG_AUTOCAST_FLOAT16 = 4
};

/* Calls the operator. The call first checks each argument against the schema;
 * TS_ERROR_INVALID_ARGUMENT names the argument and both types. flags: TS_OPERATOR_FLAG_ values and
 * own switches (TS_NUMERICS_ON), combined with "or".
 *
 * results: the tensors in order, NULL for one that the operator leaves undefined, as some backward
 * operators do. Results of other types are dropped. count: the number of tensors. The call returns
 * TS_ERROR_INVALID_ARGUMENT, before anything runs, if capacity is smaller than that number, or if
 * the operator returns a list or an optional tensor, whose number is unknown (use
 * ts_operator_call_list). Capacity 0 drops all results, as in-place operators need. */
TS_API ts_error* ts_operator_call(const ts_operator* op,
                                  ts_arguments arguments,
                                  ts_tensor* const* tensors,
                                  int64_t tensor_count,
                                  int32_t flags,
                                  ts_tensor** results,
                                  int64_t capacity,
                                  int64_t* count);

/* The flags of ts_operator_call_one, and the lengths of its arrays. */
typedef struct ts_call_counts {
  uint16_t flags; /* as for ts_operator_call */
  uint8_t args;
  uint8_t tensors;
  uint32_t ints;
} ts_call_counts;

/* Does ts_operator_call for arguments without text and for at most one result; result NULL drops
 * it. It is faster for small operators, because all parameters fit into registers and the call is
 * one level less deep. */
TS_API ts_error* ts_operator_call_one(const ts_operator* op,
                                      const ts_arg* args,
                                      ts_tensor* const* tensors,
                                      const int64_t* ints,
                                      ts_call_counts counts,
                                      ts_tensor** result);

/* The results of an operator that returns any number of tensors. */
typedef struct ts_tensor_list ts_tensor_list;

/* Does ts_operator_call for any number of results; Tensor[] results are flattened. count: their
 * number. If capacity is large enough, the results are written to `results`, and `list` becomes
 * NULL. Otherwise `list` has them, and `results` is unchanged; end the list with
 * ts_tensor_list_take or ts_tensor_list_free. */
TS_API ts_error* ts_operator_call_list(const ts_operator* op,
                                       ts_arguments arguments,
                                       ts_tensor* const* tensors,
                                       int64_t tensor_count,
                                       int32_t flags,
                                       ts_tensor** results,
                                       int64_t capacity,
                                       ts_tensor_list** list,
                                       int64_t* count);

/* Moves the references to an array of as many tensors as ts_operator_call_list counted. Takes
 * ownership of the list and frees it. The caller owns the tensors. */
TS_API void ts_tensor_list_take(ts_tensor_list* list, ts_tensor** tensors);

/* Frees the list and its tensors. */
TS_API void ts_tensor_list_free(ts_tensor_list* list);

/* The results, of any type, of an operator. */
typedef struct ts_results ts_results;

/* The sizes of the arrays that ts_results_take fills. */
typedef struct ts_results_size {
  int64_t args;
  int64_t tensors;
  int64_t ints;
} ts_results_size;

/* Does ts_operator_call for an operator that returns tensors, lists of tensors, ints, floats,
 * bools, Scalars, or absent optionals. For any other type it returns TS_ERROR_INVALID_ARGUMENT
 * before anything runs. Blocks until numbers are computed. results: ends with ts_results_take or
 * ts_results_free. */
TS_API ts_error* ts_operator_call_results(const ts_operator* op,
                                          ts_arguments arguments,
                                          ts_tensor* const* tensors,
                                          int64_t tensor_count,
                                          int32_t flags,
                                          ts_results** results,
                                          ts_results_size* size);

/* Moves the results to arrays of these sizes, encoded like arguments. Takes ownership of the
 * results and frees them. The caller owns the tensors; an undefined tensor is NULL. A dtype is an
 * int. */
TS_API void ts_results_take(ts_results* results, ts_arg* args, ts_tensor** tensors, int64_t* ints);

/* Frees the results and their tensors. */
TS_API void ts_results_free(ts_results* results);

#ifdef __cplusplus
}
#endif

#endif /* TS_OPERATOR_H_ */

// Refused arguments of compiled models. Package aoti's tests run models.
#include "support.h"

namespace {

TEST(Model, OpenRefusesWhatIsNoModel) {
  int mark = 0;
  ts_model* const untouched = reinterpret_cast<ts_model*>(&mark);
  ts_model* model = untouched;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "library is NULL",
               ts_model_open(nullptr, "", TS_DEVICE_CPU, &model));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "kernels is NULL",
               ts_model_open("model.so", nullptr, TS_DEVICE_CPU, &model));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "model is NULL",
               ts_model_open("model.so", "", TS_DEVICE_CPU, nullptr));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "/nowhere/model.so",
               ts_model_open("/nowhere/model.so", "", TS_DEVICE_CPU, &model));
  EXPECT_EQ(model, untouched);
}

TEST(Model, NoModelIsRefused) {
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "model is NULL",
               ts_model_get_structure(nullptr, nullptr, nullptr));
  ts_model* model = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "model is NULL", ts_model_add_instance(nullptr, &model));
  ts_model_weight weight = {};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "model is NULL",
               ts_model_get_weight(nullptr, 0, &weight));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "model is NULL",
               ts_model_set_weights(nullptr, nullptr, nullptr, 0));
  ts_model_free(nullptr);
}

// An address that is no model's is refused, so that a program's mistake reads no foreign memory.
TEST(Model, OperatorRefusesAnUnknownAddress) {
  const ts_operator* op = nullptr;
  ASSERT_OK(ts_operator_find(TS_MODEL_RUN, "", &op));
  const ts_arg args[] = {{TS_ARG_KIND_INT, 0, 4096}, {TS_ARG_KIND_TENSORS, 0, 0}};
  const ts_arguments arguments = {args, 2, nullptr, 0, nullptr, 0};
  ts_tensor_list* list = nullptr;
  int64_t count = -1;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "closed",
               ts_operator_call_list(op, arguments, nullptr, 0, 0, nullptr, 0, &list, &count));
}

}  // namespace

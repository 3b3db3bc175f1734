/* An NVTX tool for nvtx_test.cc, which NVTX loads instead of a profiler. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <string.h>

static char heard[1024];
static nvtxRangeId_t last;

static void note(const char* what, const char* name) {
  const size_t used = strlen(heard);
  snprintf(heard + used, sizeof heard - used, "%s %s\n", what, name);
}

static nvtxRangeId_t NVTX_API start(const nvtxEventAttributes_t* event) {
  note("start", event->message.ascii);
  return ++last;
}
static void NVTX_API end(nvtxRangeId_t id) { note("end", id == 1 ? "1" : id == 2 ? "2" : "?"); }
static void NVTX_API mark(const nvtxEventAttributes_t* event) {
  note("mark", event->message.ascii);
}

/* Returns the log of all calls, which the test reads. */
__attribute__((visibility("default"))) const char* nvtx_probe_heard(void) { return heard; }

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_export_table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const NvtxExportTableCallbacks* callbacks =
      (const NvtxExportTableCallbacks*)get_export_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table = 0;
  unsigned int size = 0;
  if (callbacks == 0 || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) {
    return 0;
  }
  *table[NVTX_CBID_CORE_RangeStartEx] = (NvtxFunctionPointer)start;
  *table[NVTX_CBID_CORE_RangeEnd] = (NvtxFunctionPointer)end;
  *table[NVTX_CBID_CORE_MarkEx] = (NvtxFunctionPointer)mark;
  return 1;
}

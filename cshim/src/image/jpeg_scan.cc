#include "image/jpeg_scan.h"

#include <cstring>

namespace ts::image {

bool describe_scan(const jpeg_decompress_struct& codec, const uint8_t* data, size_t bytes,
                   HuffmanCode codes[2][4], Scan* scan) {
  if (codec.progressive_mode || codec.arith_code || codec.data_precision != 8 ||
      (codec.num_components != 1 && codec.num_components != 3) ||
      codec.comps_in_scan != codec.num_components || codec.Ss != 0 || codec.Se != DCTSIZE2 - 1 ||
      codec.Ah != 0 || codec.Al != 0 || codec.blocks_in_MCU > kMaxBlocks ||
      codec.unread_marker != 0) {
    return false;
  }
  *scan = {};
  scan->data = data;
  scan->begin = static_cast<size_t>(codec.src->next_input_byte - data);
  scan->end = bytes;
  scan->components = codec.comps_in_scan;
  scan->blocks = codec.blocks_in_MCU;
  scan->mcus_per_row = codec.MCUs_per_row;
  scan->mcu_rows = codec.MCU_rows_in_scan;
  scan->restart_interval = codec.restart_interval;
  const auto take = [](const JHUFF_TBL* from, HuffmanCode* to) -> const HuffmanCode* {
    if (from == nullptr) return nullptr;
    std::memcpy(to->counts, from->bits, sizeof to->counts);
    std::memcpy(to->symbols, from->huffval, sizeof to->symbols);
    return to;
  };
  for (size_t i = 0; i < 4; ++i) {
    scan->dc[i] = take(codec.dc_huff_tbl_ptrs[i], &codes[0][i]);
    scan->ac[i] = take(codec.ac_huff_tbl_ptrs[i], &codes[1][i]);
  }
  for (int i = 0; i < scan->blocks; ++i) {
    const int c = codec.MCU_membership[i];
    const jpeg_component_info* component = codec.cur_comp_info[c];
    if (!component->component_needed || component->dc_tbl_no < 0 || component->ac_tbl_no < 0) {
      return false;
    }
    scan->component[i] = static_cast<uint8_t>(c);
    scan->dc_table[i] = static_cast<uint8_t>(component->dc_tbl_no);
    scan->ac_table[i] = static_cast<uint8_t>(component->ac_tbl_no);
  }
  return true;
}

}  // namespace ts::image

// The kernel without any instruction set beyond the compiler's default target.
#include "cpu_core.h"

namespace {

struct Philox {
  uint64_t key, step;
  Philox(uint64_t key, uint64_t step) : key(key), step(step) {}
  void words(uint64_t block, uint32_t* out) const {
    for (int i = 0; i < kBlocks; i++) philox_block(block + i, key, step, out + 4 * i);
  }
};

}  // namespace

const RoundPiece msr_plain = round_piece<Philox>;

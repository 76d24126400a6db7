// The plan's rows as plain structs, and the walks over a leaf and over a row.
//
// All numbers count components, the real scalars of an array. A leaf is seen as
// (outer, length, inner), and rank r owns [:, r * chunk : (r + 1) * chunk, :],
// zero where r * chunk + l reaches length. A bucket is (group_size, row_numel):
// row r holds what rank r owns of each leaf, one slot per leaf.

#ifndef JAXZERO_CORE_PLAN_H_
#define JAXZERO_CORE_PLAN_H_

#include <cstdint>

#include "core/host_device.h"

namespace jaxzero {

// What the attributes of a call mean. A program says which it was made with;
// raise the number when a column or an attribute comes, goes, moves or changes
// meaning.
inline constexpr int64_t kFormat = 1;

// A leaf's place in a row.
struct Slot {
  int64_t operand;     // index of the leaf (or shard) among operands or results
  int64_t outer;       // product of the dimensions before the cut one
  int64_t length;      // size of the cut dimension
  int64_t inner;       // product of the dimensions after it
  int64_t chunk;       // what a rank owns of `length`
  int64_t begin;       // first shard component that the slot carries
  int64_t count;       // number of shard components that it carries
  int64_t row_offset;  // where they start in the row; 16-byte aligned
  int64_t base;        // operand that the result is based on, or -1
  int64_t accumulate;  // 1: add the base; 0: it only shares the result's memory
};

// The columns of a slot table, in the order of the fields of Slot.
inline constexpr const char* kSlotColumns[] = {
    "operand", "outer", "length",     "inner", "chunk",
    "begin",   "count", "row_offset", "base",  "accumulate"};
inline constexpr int64_t kNumSlotColumns =
    sizeof(kSlotColumns) / sizeof(kSlotColumns[0]);
static_assert(sizeof(Slot) == kNumSlotColumns * sizeof(int64_t));

JAXZERO_HOST_DEVICE inline int64_t Min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
JAXZERO_HOST_DEVICE inline int64_t Max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

inline int64_t LeafNumel(const Slot& slot) {
  return slot.outer * slot.length * slot.inner;
}
inline int64_t ShardNumel(const Slot& slot) {
  return slot.outer * slot.chunk * slot.inner;
}

// One rank's part of a leaf: blocks of which the first `valid` components lie
// together in the leaf and the rest is padding.
struct RankPart {
  int64_t block;   // components from one block to the next, in the shard
  int64_t valid;   // components of a block that exist
  int64_t first;   // leaf component where the first block starts
  int64_t stride;  // components from one block to the next, in the leaf
};

JAXZERO_HOST_DEVICE inline RankPart PartOf(const Slot& slot, int64_t rank) {
  const int64_t block = slot.chunk * slot.inner;
  const int64_t start = rank * slot.chunk;
  const int64_t valid =
      Max(0, Min(slot.length - start, slot.chunk)) * slot.inner;
  // Blocks without a gap between them, or without content, are one block.
  if (slot.chunk == slot.length || valid == 0) {
    return {slot.outer * block, slot.outer * valid, 0, 0};
  }
  return {block, valid, start * slot.inner, slot.length * slot.inner};
}

// Calls copy(leaf_index, component, numel) or pad(component, numel) for each
// run of the shard components [begin, end), in order.
template <typename Copy, typename Pad>
void ForEachRun(const RankPart& part, int64_t begin, int64_t end, Copy copy,
                Pad pad) {
  if (begin >= end) return;
  int64_t within = begin % part.block;
  int64_t leaf_block = part.first + begin / part.block * part.stride;
  while (begin < end) {
    const bool exists = within < part.valid;
    const int64_t run_end = exists ? part.valid : part.block;
    const int64_t numel = Min(run_end - within, end - begin);
    if (exists) {
      copy(leaf_block + within, begin, numel);
    } else {
      pad(begin, numel);
    }
    begin += numel;
    within += numel;
    if (within == part.block) {
      within = 0;
      leaf_block += part.stride;
    }
  }
}

}  // namespace jaxzero

#endif  // JAXZERO_CORE_PLAN_H_

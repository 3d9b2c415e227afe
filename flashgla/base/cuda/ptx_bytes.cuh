// Thin wrappers around PTX instructions on bytes, beside ptx.cuh's: one function an instruction, no policy.
#pragma once

#include <cstdint>

namespace flashgla::ptx {

// Byte i of the result: byte s of b:a for the half byte i of `selectors`, s; of its sign alone where s is 8 more.
__device__ __forceinline__ std::uint32_t select_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selectors) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selectors));
  return bytes;
}

// d += a b on signed bytes, a 16x32 (row), b 32x8 (column), d 16x8 sums of 32 bits. A lane's places are those of
// ptx::mma_bf16, with four neighbours along the 32, from 4 (l%4) on, where that has two.
__device__ __forceinline__ void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flashgla::ptx

// OpenMP's thread count, which is per thread. Weak, and under names of our own: there may be no OpenMP in the program,
// and <omp.h> declares them differently.
#pragma once

extern "C" void shardlib_omp_set_num_threads(int) __asm__("omp_set_num_threads") __attribute__((weak));
extern "C" int shardlib_omp_get_max_threads() __asm__("omp_get_max_threads") __attribute__((weak));

// Header-only by default. Parts that need heavy headers of other libraries keep their definitions in *_inl.hpp; a
// program that defines SHARDLIB_COMPILED and links shardlib::compiled has those compiled once, in that library.
#pragma once

#ifdef SHARDLIB_COMPILED
#define SHARDLIB_INLINE
#else
#define SHARDLIB_INLINE inline
#endif

// Header-only by default. What is no template (kernels, tape, communicators, files) has its definitions in impl/ folders; a
// program that defines SHARDLIB_COMPILED and links shardlib::compiled has those compiled once, in that library.
#pragma once

#ifdef SHARDLIB_COMPILED
#define SHARDLIB_INLINE
#else
#define SHARDLIB_INLINE inline
#endif

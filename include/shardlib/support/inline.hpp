// Header-only by default. Code that is not a template (kernels, tape, communicators, files) is defined in impl/
// folders. A program that defines SHARDLIB_COMPILED and links shardlib::compiled uses the definitions compiled in
// that library.
#pragma once

#ifdef SHARDLIB_COMPILED
#define SHARDLIB_INLINE
#else
#define SHARDLIB_INLINE inline
#endif

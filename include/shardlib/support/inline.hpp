// Header-only by default. Code that is not a template (kernels, tape, communicators, files) is defined in impl/
// folders. A program that defines SHARDLIB_COMPILED and links shardlib::compiled uses the definitions compiled in
// that library.
#pragma once

#ifdef SHARDLIB_COMPILED
#define SHARDLIB_INLINE
/// An instance of a function template, compiled into shardlib::compiled: `SHARDLIB_INSTANCE(softmax<f32>)`
#define SHARDLIB_INSTANCE(...) template decltype(__VA_ARGS__) __VA_ARGS__;
#else
#define SHARDLIB_INLINE inline
#endif

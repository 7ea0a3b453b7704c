#include <shardlib/shardlib.hpp>

int other() { return static_cast<int>(sizeof(shardlib::f32)); }

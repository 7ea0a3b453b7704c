// Types alone: nothing but the standard library is included.
#include <shardlib/shapes.hpp>

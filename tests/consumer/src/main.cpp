// Both translation units include the library; linking them shows that no header defines a symbol twice.
#include <shardlib/shardlib.hpp>

int other();

int main() { return other() == static_cast<int>(sizeof(shardlib::f32)) ? 0 : 1; }

// A program that takes its flags from pkg-config: devices only, since all the library takes long to compile.
#include <shardlib/device/launch.hpp>
#include <shardlib/support/version.hpp>

static_assert(SHARDLIB_VERSION ==
              SHARDLIB_VERSION_MAJOR * 10000 + SHARDLIB_VERSION_MINOR * 100 + SHARDLIB_VERSION_PATCH);

int main(int argc, char** argv) {
  return shardlib::run_program(argc, argv, [] {
    shardlib::launch({{"d", shardlib::under_mpi() ? shardlib::world_size() : 2}},
                     [](const shardlib::DevicePtr& device) { device->group({"d"}).barrier(); });
    return 0;
  });
}

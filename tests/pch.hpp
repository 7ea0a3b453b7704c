// Headers that every test includes anyway, compiled once.
#pragma once

#include <Kokkos_Core.hpp>

#include <Eigen/Core>
#include <fmt/format.h>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

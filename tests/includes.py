#!/usr/bin/env python3
"""Checks that every file of include/, examples/, benchmarks/ and tests/ includes the standard headers, and those of fmt, whose
names it uses. A header of the library also has to include those of OWN. The programs of tests/compile_fail are left out, because
each shows one mistake.

includes.py [--root DIR] [--fix]: fails on a name such as std::string in a file that includes <string> neither itself
nor through the header that it defines (impl/X.hpp includes X.hpp). Other compilers and libraries may include less
indirectly than those that the file was written with. The library's headers must also include the headers of its own
widely used names, such as Error. --fix adds the lines. Needs nothing but Python's standard library.
"""
import pathlib
import re
import sys

from checks import arguments

HEADERS = {
    "algorithm": "all_of any_of none_of find find_if count count_if copy copy_n fill fill_n generate sort stable_sort"
    " partial_sort lower_bound upper_bound min max clamp minmax min_element max_element equal transform replace"
    " reverse rotate unique remove_if nth_element for_each equal_range binary_search partition",
    "array": "array",
    "atomic": "atomic atomic_ref memory_order_relaxed memory_order_acquire memory_order_release",
    "bit": "bit_floor bit_ceil bit_width bit_cast popcount countr_zero has_single_bit endian",
    "charconv": "from_chars to_chars",
    "chrono": "chrono",
    "cmath": "sqrt pow exp log sin cos tanh isnan isfinite isinf floor ceil fabs lround llround ldexp frexp log2",
    "complex": "complex",
    "concepts": "integral floating_point same_as convertible_to invocable derived_from",
    "condition_variable": "condition_variable",
    "cstddef": "size_t ptrdiff_t byte nullptr_t",
    "cstdint": "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t",
    "cstdio": "fputs fflush fprintf printf FILE fopen fclose fwrite stderr snprintf",
    "cstdlib": "getenv exit abort strtol malloc free aligned_alloc",
    "cstring": "memcpy memset memmove memcmp strerror strlen strcmp",
    "deque": "deque",
    "exception": "exception exception_ptr current_exception rethrow_exception uncaught_exceptions terminate",
    "filesystem": "filesystem",
    "fstream": "ifstream ofstream fstream",
    "functional": "function plus minus multiplies divides less greater invoke",
    "future": "future promise async packaged_task",
    "initializer_list": "initializer_list",
    "iostream": "cout cerr cin clog",
    "iterator": "back_inserter next prev distance advance make_move_iterator reverse_iterator",
    "limits": "numeric_limits",
    "list": "list",
    "map": "map multimap",
    "memory": "unique_ptr shared_ptr weak_ptr make_unique make_shared enable_shared_from_this addressof",
    "mutex": "mutex lock_guard unique_lock scoped_lock once_flag call_once",
    "new": "bad_alloc launder align_val_t",
    "numeric": "accumulate iota reduce inner_product gcd lcm exclusive_scan",
    "optional": "optional nullopt",
    "random": "mt19937 mt19937_64 uniform_int_distribution normal_distribution uniform_real_distribution",
    "set": "set multiset",
    "source_location": "source_location",
    "span": "span",
    "sstream": "stringstream ostringstream istringstream",
    "stdexcept": "runtime_error logic_error invalid_argument out_of_range",
    "string": "string to_string stoi stol stoll stod getline",
    "string_view": "string_view",
    "system_error": "system_error errc error_code",
    "thread": "thread this_thread jthread",
    "tuple": "tuple tuple_element_t tuple_size_v make_tuple apply tie forward_as_tuple",
    "type_traits": "enable_if_t conditional_t is_same_v is_same remove_cvref_t remove_const_t decay_t is_integral_v"
    " is_floating_point_v true_type false_type void_t is_convertible_v is_invocable_v invoke_result_t type_identity"
    " is_trivially_copyable_v is_const_v common_type_t is_constant_evaluated underlying_type_t",
    "typeinfo": "type_info",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "move forward swap exchange pair make_pair index_sequence make_index_sequence index_sequence_for"
    " declval integer_sequence",
    "variant": "variant visit holds_alternative",
    "vector": "vector",
}
WHERE = {name: header for header, names in HEADERS.items() for name in names.split()}
# Read with more than one header, or made by the compiler from what the caller has.
ANY_OF = {"size_t": {"cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "string", "string_view", "vector", "span"},
          "move": {"utility", "algorithm"}, "swap": {"utility", "algorithm"},
          "apply": {"tuple"}, "size": {"iterator"}}
FMT = {"join": "fmt/ranges.h", "format": "fmt/format.h", "print": "fmt/format.h"}
# Widely used names of the library itself. A header that only declares one of them needs no include.
OWN = {
    "shardlib/support/error.hpp": "Error UsageError",
    "shardlib/support/inline.hpp": "SHARDLIB_INLINE",
    "shardlib/support/function.hpp": "SHARDLIB_FUNCTION",
    "shardlib/support/handle.hpp": "Handle Counted",
    "shardlib/support/stopwatch.hpp": "Stopwatch steady_ns steady_seconds",
    "shardlib/support/text.hpp": "continues_character excerpt markup_escape",
    "shardlib/support/tuning.hpp": "Tuning",
    "shardlib/spec/dtype.hpp": "DType dtype_v accumulator_t",
    "shardlib/device/mesh_axes.hpp": "AxisSize parse_mesh axis_size",
    "shardlib/io/box.hpp": "show_shape for_each_run",
}
OWN_USE = {header: re.compile(rf"(?<![\w.>~])(?<!kernels::)(?:{names.replace(' ', '|')})\b") for header, names in OWN.items()}
OWN_DECLARED = r"\b(?:struct|class|enum class|using|define)\s+{}\b"
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", re.M)


def included(path, root, seen=None):
    """What the file includes itself, and, where it defines another header, what that one does."""
    names = {match[2] for match in INCLUDE.finditer(path.read_text())}
    own = path.parent.parent / path.name if path.parent.name == "impl" else None
    owners = [root / "include" / name for name in names if name.startswith("shardlib/") and path.parent.name == "impl"
              and (root / "include" / name).parent == path.parent.parent and path.stem.startswith(pathlib.Path(name).stem)]
    for owner in {own, *owners} - {None}:
        if owner.exists():
            names |= {match[2] for match in INCLUDE.finditer(owner.read_text())}
    return names


def missing(path, root):
    text = path.read_text()
    code = COMMENT.sub(lambda match: match[0] if match[0][0] == "<" else " ", text)
    have = included(path, root)
    found = {}
    for match in re.finditer(r"\bstd::(?:ranges::)?(\w+)", code):
        header = WHERE.get(match[1])
        if header and header not in have and not (ANY_OF.get(match[1], set()) & have):
            found.setdefault(header, f"std::{match[1]}")
    for match in re.finditer(r"\bfmt::(\w+)", code):
        header = FMT.get(match[1])
        if header and header not in have and not (header == "fmt/format.h" and "fmt/ranges.h" in have):
            found.setdefault(header, f"fmt::{match[1]}")
    if (root / "include") in path.parents:
        for header, use in OWN_USE.items():
            if header in have or header == str(path.relative_to(root / "include")):
                continue
            for match in use.finditer(code):
                if not re.search(OWN_DECLARED.format(match[0]), code):
                    found.setdefault(header, match[0])
    return found


def fix(path, headers):
    lines = path.read_text().split("\n")
    fmt = [header for header in headers if header.startswith("fmt/")]
    std = [header for header in headers if "/" not in header]
    own = [f'#include "{header}"' for header in headers if header.startswith("shardlib/")]
    for group, pattern in ((std, r"#include <[a-z_0-9]+>$"), (fmt, r"#include <fmt/")):
        if not group:
            continue
        at = [i for i, line in enumerate(lines) if re.match(pattern, line)]
        new = [f"#include <{header}>" for header in group]
        if at:
            last = at[0]
            while last + 1 < len(lines) and re.match(pattern, lines[last + 1]):
                last += 1
            lines[at[0]:last + 1] = sorted(set(lines[at[0]:last + 1] + new))
        else:
            first = next(i for i, line in enumerate(lines) if re.match(r"#include|#pragma once", line))
            pragma = lines[first].startswith("#pragma")
            while pragma and first + 1 < len(lines) and (not lines[first + 1] or lines[first + 1].startswith("#include \"shardlib/")
                                                      and not lines[first + 2]):
                first += 1
            lines[first + (1 if pragma else 0):first + (1 if pragma else 0)] = (sorted(new) + [""])
    if own:
        end = next((i for i, line in enumerate(lines) if line.startswith(("namespace", "#if"))), len(lines))
        at = [i for i, line in enumerate(lines[:end]) if line.startswith('#include "shardlib/')]
        if at and not (path.parent.name == "impl" and len(at) == 1):
            first = last = at[-1]
            while lines[first - 1].startswith('#include "shardlib/'):
                first -= 1
            lines[first:last + 1] = sorted(lines[first:last + 1] + own)
        else:
            last = max(i for i, line in enumerate(lines[:end]) if line.startswith(("#include", "#pragma once")))
            lines[last + 1:last + 1] = ["", *sorted(own)]
    path.write_text("\n".join(lines))


def main():
    options = arguments(root=pathlib.Path(__file__).resolve().parents[1], fix=False)
    files = [*sorted((options.root / "include").rglob("*.hpp"))]
    for folder in ("examples", "benchmarks", "tests"):
        files += sorted(path for path in (options.root / folder).rglob("*.?pp") if path.parent.name != "compile_fail")
    wrong = 0
    for path in files:
        found = missing(path, options.root)
        if found and options.fix:
            fix(path, sorted(found))
            continue
        for header, name in sorted(found.items()):
            print(f"{path.relative_to(options.root)}: uses {name}; include <{header}>")
            wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

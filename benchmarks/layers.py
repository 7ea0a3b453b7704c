"""Functions that the benchmarks of layers over links share: their arguments, steps over a link, and the table of steps over
max(T_compute, T_wire)."""
import json
import shlex
import statistics

from common import Hosts, built, gbit, parser_of, ran
from overlap import long_packet


def layer_parser(description, **numbers):
    """A parser of --build, --rates and `numbers`."""
    parser = parser_of(description, data=False, **numbers)
    parser.add_argument("--rates", type=gbit, nargs="+", default=[1, 2, 4, 8], metavar="GBIT", help="of the links (default: 1 2 4 8)")
    return parser


def program_of(name, options):
    """The benchmark's program, with the sizes that all its forms share."""
    return [built(options.build, f"benchmarks/{name}"), f"--seq={options.seq}", f"--layers={options.layers}",
            f"--d-model={options.d_model}", f"--steps={options.steps}"]  # fmt: skip


def over_link(rate, commands):
    """The median seconds of a step, and the loss, of each command on two ranks over a link of `rate` Gbit/s."""
    with Hosts(rate, packet=long_packet()) as mpirun:
        found = [json.loads(ran(shlex.split(mpirun) + command)) for command in commands]
    return [(statistics.median(one["seconds"]), one["loss"]) for one in found]


def print_table(options, alone, forms, check, digits=0):
    """Measures each form, a command by its name, over each rate and without a limit, with `alone` for comparison, and prints the table.
    `check` gets the loss of `alone` and those of the forms."""
    size = {form: int(ran([*command, "--count"])) for form, command in forms.items()}
    print(f"{options.layers} layers, d_model {options.d_model}, {options.batch} x {options.seq} tokens, 2 ranks; a rank sends "
          + ", ".join(f"{size[form] / 1e6:.{digits}f} MB a step ({form})" for form in forms))  # fmt: skip
    width = max(map(len, forms)) + 3
    print(f"{'Gbit/s':<10}{'form':{width}}{'T_compute ms':>12}{'T_wire ms':>11}{'ms a step':>11}{'over max':>10}")
    rows = {(rate, form): [] for rate in [*options.rates, None] for form in forms}
    for _ in range(options.rounds):
        for rate in [*options.rates, None]:
            (compute, expected), *steps = over_link(rate, [alone, *forms.values()])
            check(expected, {form: loss for form, (_, loss) in zip(forms, steps)})
            for form, (time, _) in zip(forms, steps):
                wire = 8 * size[form] / (rate * 1e9) if rate else 0
                rows[rate, form].append((time / max(compute, wire), compute, wire, time))
    for (rate, form), rounds in rows.items():
        ratio, compute, wire, time = map(statistics.median, zip(*rounds))
        print(f"{f'{rate:g}' if rate else 'no limit':<10}{form:{width}}{1e3 * compute:>12.0f}{1e3 * wire:>11.0f}{1e3 * time:>11.0f}"
              f"{ratio:>10.2f}  ({min(rounds)[0]:.2f} .. {max(rounds)[0]:.2f})")  # fmt: skip

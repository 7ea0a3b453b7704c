#!/usr/bin/env python3
"""Runs shardlib-checkpoint from-seqax and to-seqax on a checkpoint that python3-zarr writes as seqax does. The result has to be
the same bit for bit. Also checks the messages of mistakes.

seqax_checkpoints.py --tool SHARDLIB_CHECKPOINT
"""
import os
import shutil
import tempfile

from checks import arguments, check, finish, ran, require_zarr, zarr_array, zarr_group

require_zarr()
import numpy  # noqa: E402
import zarr  # noqa: E402
from gpt2_oracle import read, read_all, write

LAYERS, WIDTH, QUERIES, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 8, 2, 3, 4, 10, 13
# The fields of seqax's Model and TransformerLayer. An array's name is that of its tree and this, without a separator.
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "unembed": (VOCABULARY, WIDTH),
    "transformerln1": (LAYERS, WIDTH),
    "transformerln2": (LAYERS, WIDTH),
    "transformerw_q": (LAYERS, WIDTH, QUERIES, HEADS, HEAD),
    "transformerw_kv": (LAYERS, 2, WIDTH, HEADS, HEAD),
    "transformerw_o": (LAYERS, WIDTH, QUERIES, HEADS, HEAD),
    "transformerw_gate": (LAYERS, WIDTH, HIDDEN),
    "transformerw_up": (LAYERS, WIDTH, HIDDEN),
    "transformerw_down": (LAYERS, WIDTH, HIDDEN),
    "final_layer_norm": (WIDTH,),
}


def make(path, state, complete=True):
    """As seqax's save_zarr: zarr's own compressor, no fill value, chunks that are shards."""
    root = zarr_group(path, mode="w-")
    for name, values in state.items():
        chunks = tuple(-(-n // 2) for n in values.shape)
        zarr_array(path, name, values=values, chunks=chunks, fill_value=None)
    if complete:
        root.attrs["write_completed"] = True


def expected_leaves(state):
    """gpt_fsdp's leaves of a state of seqax's."""
    leaves = {}
    for theirs, ours in (("weights", "weights"), ("adam_mu", "mu"), ("adam_nu", "nu")):
        for name, leaf in (("embed", "embed"), ("unembed", "unembed.0"), ("final_layer_norm", "final_norm")):
            leaves[f"{ours}.{leaf}"] = state[theirs + name]
        for i in range(LAYERS):
            for name, leaf in (("ln1", "norm1"), ("ln2", "norm2"), *((w, w) for w in ("w_q", "w_o", "w_gate", "w_up", "w_down"))):
                leaves[f"{ours}.layers.{i}.{leaf}"] = state[f"{theirs}transformer{name}"][i]
            for j, leaf in enumerate(("w_k", "w_v")):
                leaves[f"{ours}.layers.{i}.{leaf}"] = state[f"{theirs}transformerw_kv"][i, j]
    return leaves


def main():
    tool = arguments("tool").tool

    def run(status, *words):
        done = ran(status, tool, *words, timeout=60)
        return done.stdout + done.stderr

    random = numpy.random.default_rng(1)
    state = {tree + name: random.standard_normal(shape).astype("<f4") for tree in ("weights", "adam_mu", "adam_nu")
             for name, shape in SHAPES.items()}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="shardlib_seqax_checkpoints_") as root:
        theirs, ours, back = (os.path.join(root, name) for name in ("model", "run", "back"))
        path = os.path.join(theirs, "0000000120")
        make(path, state)
        said = run(0, "from-seqax", path, ours)
        check("layers 3, d_model 8, n_q_per_kv 2, n_kv 3, d_head 4, d_ff 10, vocabulary 13" in said, "from-seqax: " + said)
        made, file = os.path.join(ours, "step-00000120"), os.path.join(root, "made.safetensors")
        run(0, "verify", made)
        run(0, "to-safetensors", made, file)
        expected = expected_leaves(state)
        leaves = {name: numpy.frombuffer(data, "<f4").reshape(shape) for name, (_, shape, data) in read(file).items()}
        check(set(leaves) == set(expected), f"leaves: {sorted(set(leaves) ^ set(expected))}")
        for name, values in expected.items():
            check(leaves[name].tobytes() == values.tobytes() and leaves[name].shape == values.shape, f"from-seqax: {name}")

        run(0, "to-seqax", made, back)
        group = zarr.open_group(os.path.join(back, "0000000120"), mode="r")
        check(group.attrs["write_completed"] is True and set(group.array_keys()) == set(state), "to-seqax: arrays and marker")
        for name, values in state.items():
            check(group[name].dtype == values.dtype and group[name].shape == values.shape and
                  group[name][...].tobytes() == values.tobytes(), f"to-seqax: {name}")  # fmt: skip
        check(os.listdir(back) == ["0000000120"], "to-seqax leaves nothing else")

        check("already exists" in run(2, "from-seqax", path, ours), "no checkpoint is replaced")
        check("already exists" in run(2, "to-seqax", made, back), "no checkpoint of seqax is replaced")
        said = run(2, "from-seqax", path, ours, "--step", "7")
        check("has step-00000120" in said and "earlier step-00000007" in said, "a run does not go back unasked: " + said)
        run(0, "from-seqax", path, ours, "--step", "130")
        run(0, "to-seqax", os.path.join(ours, "step-00000130"), back)
        check(sorted(os.listdir(back)) == ["0000000120", "0000000130"], "steps")
        check("0000000120'" in run(2, "from-seqax", theirs, ours), "the folder of the model names a checkpoint in it")
        check("there is no folder" in run(2, "from-seqax", root + "/no", ours), "no folder")

        def refused(status, part, change, complete=True):
            bad = os.path.join(root, "bad", "0000000005")
            shutil.rmtree(os.path.dirname(bad), ignore_errors=True)
            changed = dict(state)
            change(changed)
            make(bad, changed, complete)
            said = run(status, "from-seqax", bad, ours)
            check(part in said and bad in said, f"{part!r} is not in {said}")
            check("step-00000005" not in os.listdir(ours), f"{part}: nothing is made")

        refused(1, "no write_completed", lambda s: None, False)
        refused(2, "'adam_nuembed' is missing", lambda s: s.pop("adam_nuembed"))
        refused(2, "'weightsextra' has no place", lambda s: s.update(weightsextra=s["weightsembed"]))
        refused(2, "'weightsunembed' has the dtype <f8", lambda s: s.update(weightsunembed=s["weightsunembed"].astype("<f8")))
        refused(2, "'adam_mutransformerw_up' has 9 for F, which is 10",
                lambda s: s.update(adam_mutransformerw_up=s["adam_mutransformerw_up"][:, :, :9]))
        refused(2, "does not begin with [3, 2]", lambda s: s.update(weightstransformerw_kv=s["weightstransformerw_kv"][:, :1]))

        # A checkpoint without the setting of --init seqax computes another attention.
        metadata, tensors = read_all(file)
        for name, value in ("optimizer", '"muon"'), ("ema", "0.5"):
            write(file, tensors, {**metadata, f"setting.{name}": value})
            run(0, "from-safetensors", file, os.path.join(root, name), "--step", "3")
            check(f"--{name}" in run(2, "to-seqax", os.path.join(root, name, "step-00000003"), back), f"--{name}")
        metadata.pop("setting.init")
        write(file, tensors, metadata)
        run(0, "from-safetensors", file, os.path.join(root, "plain"), "--step", "3")
        check("--init depth-scaled" in run(2, "to-seqax", os.path.join(root, "plain", "step-00000003"), back), "--init")
    finish()


main()

#!/usr/bin/env python3
"""Checks that gpt_fsdp with --init seqax is seqax's model: compares its first losses, gradient norms and weights with those of an
independent implementation of seqax's train.py (model, loss, clipping, AdamW, learning rate) in numpy, in double precision.

seqax_oracle.py --gpt PROGRAM --checkpoint SHARDLIB_CHECKPOINT [--dataset DIR]

The program makes its data. DIR is seqax's sample data set, which is optional. Needs python3-zarr.
"""
import os
import tempfile

from checks import arguments, check, finish, ran, records, require_zarr
from gpt2_oracle import read

require_zarr()
import numpy  # noqa: E402
import zarr  # noqa: E402
from flat_tokens_oracle import batches, make_dataset  # noqa: E402

# The preset local-test-synthetic of seqax and of gpt_fsdp, with a quarter of its batch.
WIDTH, QUERIES, HEADS, HEAD, LAYERS, HIDDEN, VOCABULARY, TIMESCALE = 256, 2, 2, 32, 2, 1024, 1280, 256
BATCH, LENGTH, WARMUP, DECAY_STEPS, RATE, FINAL = 16, 64, 10, 100, 3e-5, 0.1
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.95, 1e-8, 0.1
TRUNCATED = 0.87962566103423978  # standard deviation of the normal distribution between -2 and 2
STEPS = 4
PROMPT = "In the beginning"


def norm(x, scale):
    inverse = 1 / numpy.sqrt(numpy.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * inverse * scale, inverse


def norm_backward(ct, x, inverse, scale):
    y = ct * scale
    return (
        inverse * y - x * inverse**3 * numpy.mean(y * x, axis=-1, keepdims=True),
        numpy.sum(ct * x * inverse, axis=(0, 1)),
    )


def rotated(x, sign):
    """RoPE of "B L ... D", where pairs are halves of a head; sign -1 turns back."""
    turns = numpy.arange(x.shape[1])[:, None] / TIMESCALE ** (numpy.arange(HEAD // 2) / (HEAD // 2))[None]
    turns = turns.reshape((1, x.shape[1]) + (1,) * (x.ndim - 3) + (HEAD // 2,))
    sin, cos = sign * numpy.sin(turns), numpy.cos(turns)
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return numpy.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def e(spec, *operands):
    return numpy.einsum(spec, *operands, optimize=True)


def log_probabilities(w, inputs, segments):
    """Those of all tokens, and what the backward pass needs. Leaves have the names of gpt_fsdp's: its w_k and w_v are the
    halves of seqax's w_kv."""
    seen = numpy.tril(numpy.ones((inputs.shape[1], inputs.shape[1]), bool))[None] & (segments[:, :, None] == segments[:, None, :])
    seen = seen[:, :, :, None, None]
    x = w["embed"][inputs]
    tape = []
    for i in range(LAYERS):
        p = {name: w[f"layers.{i}.{name}"] for name in ("norm1", "norm2", "w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")}
        n1, r1 = norm(x, p["norm1"])
        q, k = rotated(e("blm,mqkd->blqkd", n1, p["w_q"]), 1), rotated(e("blm,mkd->blkd", n1, p["w_k"]), 1)
        v = e("blm,mkd->blkd", n1, p["w_v"])
        scores = numpy.where(seen, e("blqkd,bjkd->bljqk", q, k), -1e10)  # not divided by the root of d_head
        weights = numpy.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        attended = e("bljqk,bjkd->blqkd", weights, v)
        y = x + e("blqkd,mqkd->blm", attended, p["w_o"])
        n2, r2 = norm(y, p["norm2"])
        gate, up = n2 @ p["w_gate"], n2 @ p["w_up"]
        sigmoid = 1 / (1 + numpy.exp(-gate))
        tape.append((p, x, n1, r1, q, k, v, weights, attended, y, n2, r2, gate, up, sigmoid))
        x = y + (gate * sigmoid * up) @ p["w_down"].T
    n, r = norm(x, w["final_norm"])
    logits = n @ w["unembed.0"].T
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= numpy.log(numpy.exp(logits).sum(axis=-1, keepdims=True))
    return logits, tape, (x, n, r)


def loss_and_gradients(w, inputs, targets, segments):
    """The mean loss of all tokens."""
    logits, tape, (x, n, r) = log_probabilities(w, inputs, segments)
    at = numpy.take_along_axis(logits, targets[..., None], axis=-1)
    loss = -at.mean()

    g = {}
    ct = numpy.exp(logits)
    numpy.put_along_axis(ct, targets[..., None], numpy.exp(at) - 1, axis=-1)
    ct /= targets.size
    g["unembed.0"] = e("blv,blm->vm", ct, n)
    ct, g["final_norm"] = norm_backward(ct @ w["unembed.0"], x, r, w["final_norm"])
    for i in reversed(range(LAYERS)):
        p, x, n1, r1, q, k, v, weights, attended, y, n2, r2, gate, up, sigmoid = tape[i]
        d = {"w_down": e("blm,blf->mf", ct, gate * sigmoid * up)}
        hidden = ct @ p["w_down"]
        d_gate, d_up = hidden * up * sigmoid * (1 + gate * (1 - sigmoid)), hidden * gate * sigmoid
        d["w_gate"], d["w_up"] = e("blm,blf->mf", n2, d_gate), e("blm,blf->mf", n2, d_up)
        below, d["norm2"] = norm_backward(d_gate @ p["w_gate"].T + d_up @ p["w_up"].T, y, r2, p["norm2"])
        ct = ct + below
        d["w_o"] = e("blm,blqkd->mqkd", ct, attended)
        d_attended = e("blm,mqkd->blqkd", ct, p["w_o"])
        d_v = e("bljqk,blqkd->bjkd", weights, d_attended)
        d_weights = e("blqkd,bjkd->bljqk", d_attended, v)
        d_scores = weights * (d_weights - (weights * d_weights).sum(axis=2, keepdims=True))
        d_q, d_k = rotated(e("bljqk,bjkd->blqkd", d_scores, k), -1), rotated(e("bljqk,blqkd->bjkd", d_scores, q), -1)
        d["w_q"] = e("blm,blqkd->mqkd", n1, d_q)
        d["w_k"], d["w_v"] = e("blm,blkd->mkd", n1, d_k), e("blm,blkd->mkd", n1, d_v)
        below = e("blqkd,mqkd->blm", d_q, p["w_q"]) + e("blkd,mkd->blm", d_k, p["w_k"]) + e("blkd,mkd->blm", d_v, p["w_v"])
        below, d["norm1"] = norm_backward(below, x, r1, p["norm1"])
        ct = ct + below
        g |= {f"layers.{i}.{name}": value for name, value in d.items()}
    g["embed"] = numpy.zeros_like(w["embed"])
    numpy.add.at(g["embed"], inputs, ct)
    return loss, g


def learning_rate(step):
    if step < WARMUP:
        return RATE * step / WARMUP
    cosine = numpy.cos(numpy.pi * (step - WARMUP) / (DECAY_STEPS - WARMUP))
    return RATE * (FINAL + (1 - FINAL) * (cosine / 2 + 0.5))


def trained(w, rows):
    """[(loss, norm of the gradients before clipping, learning rate)] of the steps, which change w."""
    mu, nu, steps = {name: 0.0 for name in w}, {name: 0.0 for name in w}, []
    for step, batch in enumerate(rows):
        loss, g = loss_and_gradients(w, *batch)
        length = numpy.sqrt(sum((x * x).sum() for x in g.values()))
        rate = learning_rate(step)
        for name in w:
            x = g[name] * min(1, 1 / length)
            mu[name] = BETA1 * mu[name] + (1 - BETA1) * x
            nu[name] = BETA2 * nu[name] + (1 - BETA2) * x * x
            moved = mu[name] / (1 - BETA1 ** (step + 1)) / (numpy.sqrt(nu[name] / (1 - BETA2 ** (step + 1))) + EPSILON)
            w[name] = w[name] - rate * (moved + DECAY * w[name])
        steps.append((loss, length, rate))
    return steps


def read_safetensors(path):
    return {
        name: numpy.frombuffer(data, "<f4").reshape(shape).astype(numpy.float64)
        for name, (_, shape, data) in read(path).items()
    }


def check_first_values(w):
    def deviates(name, expected, most):
        x = w[name]
        # The standard error of a deviation of n numbers is about 1/sqrt(2 n) of it.
        check(abs(x.std() / expected - 1) < 5 / numpy.sqrt(2 * x.size), f"{name} deviates by {x.std()}, not {expected}")
        check(abs(x.mean()) < 5 * expected / numpy.sqrt(x.size), f"{name} has the mean {x.mean()}")
        check(abs(x).max() <= most, f"{name} reaches {abs(x).max()}, beyond {most}")

    deviates("embed", 1, 7)
    for name, fan_in in [("unembed.0", WIDTH)] + [
        (f"layers.{i}.{name}", fan_in) for i in range(LAYERS)
        for name, fan_in in {"w_q": WIDTH * HEAD, "w_k": WIDTH, "w_v": WIDTH, "w_o": QUERIES * HEADS * HEAD, "w_gate": WIDTH,
                             "w_up": WIDTH, "w_down": HIDDEN}.items()
    ]:  # fmt: skip
        deviates(name, fan_in**-0.5, 2.00001 / TRUNCATED * fan_in**-0.5)
    for name in ("final_norm", "layers.0.norm1", "layers.1.norm2"):
        check((w[name] == 1).all(), f"{name} is not 1")


def main():
    args = arguments("gpt", "checkpoint", dataset=None)
    with tempfile.TemporaryDirectory(prefix="shardlib_seqax_") as root:
        made = os.path.join(root, "made.zarr")
        make_dataset(made)
        dataset = args.dataset if args.dataset and os.path.isdir(args.dataset) else made
        group = zarr.open_group(dataset, mode="r")["train"]
        rows = [part.reshape(STEPS, BATCH, LENGTH) for part in batches(group, "packed", BATCH, LENGTH, True, STEPS)[:3]]
        expected = final = None
        for mesh in ("d=4,t=2", "d=1,t=1"):
            run = os.path.join(root, mesh.replace("=", "").replace(",", ""))
            ran(0, args.gpt, "--preset=local-test-synthetic", f"--mesh={mesh}", f"--data={dataset}", "--rows=packed",
                "--shuffle=no", f"--steps={STEPS}", f"--batch={BATCH}", "--save-every=1", "--keep=9", f"--run={run}",
                f"--prompt={PROMPT}", "--sample-begin=-1", f"--logits={run}-logits")  # fmt: skip

            def weights(step):
                file = os.path.join(root, "weights.safetensors")
                folder = os.path.join(run, "checkpoints", f"step-{step:08d}")
                ran(0, args.checkpoint, "to-safetensors", folder, file, "--prefix=weights.")
                return read_safetensors(file)

            metrics = records(run, "metrics.jsonl")
            if expected is None:
                # The learning rate of step 0 is 0: what it leaves are the first values.
                final = weights(1)
                check_first_values(final)
                expected = trained(final, list(zip(*rows)))
            for step, (loss, length, rate) in enumerate(expected):
                seen = [m for m in metrics if m.get("step") == step and "loss" in m][0]
                for name, value, tolerance in (("loss", loss, 2e-6), ("grad_norm", length, 2e-4), ("learning_rate", rate, 1e-6)):
                    check(abs(seen[name] - value) <= tolerance * abs(value), f"{mesh}, step {step}: {name} {seen[name]}, not {value}")
            last = weights(STEPS)
            tokens = numpy.array([list(PROMPT.encode())])  # bytes are the ids; decoding has a cache of keys and values
            logits = read_safetensors(f"{run}-logits")["logits"]
            apart = abs(logits - numpy.log(numpy.exp(logits).sum(axis=-1, keepdims=True)) - log_probabilities(last, tokens, 0 * tokens)[0][0])
            check(apart.max() < 1e-4, f"{mesh}: the prompt's logits are {apart.max()} apart")
            check(last.keys() == final.keys(), f"{mesh}: leaves {sorted(last)}")
            for name in final:
                # AdamW's first steps move each element by about the learning rate, whatever its gradient: a gradient near 0
                # may move it the other way.
                apart = abs(last[name] - final[name])
                check(apart.mean() < 2e-8 + 0.01 * RATE and apart.max() < RATE, f"{mesh}: {name} is {apart.mean()} apart, {apart.max()} at most")
    print(f"data: {os.path.basename(dataset)}")
    finish()


main()

#!/usr/bin/env python3
"""Llama and Mistral folders in Hugging Face's layout: examples/gpt_fsdp gives the logits of an independent Llama, and the
weights back; what it does not compute exactly, it refuses.

llama_oracle.py --gpt PROGRAM      makes folders with random weights, and computes their logits in double precision; Python's
                                   standard library is enough
"""
import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

from gpt2_oracle import floats, read, write

# 301 tokens and 40 of feed_forward: no mesh divides them. Bytes are tokens; the prompt has multi-byte characters.
PROMPT = "In the begínning"
TOKENS = list(PROMPT.encode())
BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 301, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "use_cache": True,
    "transformers_version": "4.45.0", "pad_token_id": None,
}  # fmt: skip
# A pair of each kind: kept, in between, divided.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 300}  # fmt: skip
MODELS = {
    "llama": {**BASE, "rope_scaling": LLAMA3},
    "mistral": {**BASE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 8, "sliding_window": None,
                "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.5}},
    # Without a bos_token_id it is 1. The keys at the end change nothing.
    "one_kv_head": {**{k: v for k, v in BASE.items() if k not in ("rope_theta", "bos_token_id")}, "num_key_value_heads": 1,
                    "num_hidden_layers": 1, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
                    "eos_token_id": None, "max_position_embeddings": 10, "is_llama_config": True, "rope_interleaved": False,
                    "_attn_implementation_autoset": True,
                    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}},
}  # fmt: skip


def shapes(c):
    m, f = c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim") or m // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    named = {"model.embed_tokens.weight": [c["vocab_size"], m], "model.norm.weight": [m]}
    for i in range(c["num_hidden_layers"]):
        named |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [m], "post_attention_layernorm": [m], "self_attn.q_proj": [q, m],
                "self_attn.k_proj": [kv, m], "self_attn.v_proj": [kv, m], "self_attn.o_proj": [m, q],
                "mlp.gate_proj": [f, m], "mlp.up_proj": [f, m], "mlp.down_proj": [m, f],
            }.items()
        }  # fmt: skip
    if not c["tie_word_embeddings"]:
        named["lm_head.weight"] = [c["vocab_size"], m]
    return named


def weights(c, seed, dtype):
    """{name: (dtype, shape, bytes)}"""
    draw, tensors = random.Random(seed), {}
    for name, shape in shapes(c).items():
        center = 1 if "norm" in name else 0
        values = [center + 0.3 * draw.gauss(0, 1) for _ in range(math.prod(shape))]
        data = struct.pack(f"<{len(values)}f", *values)
        if dtype == "BF16":
            data = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
        tensors[name] = (dtype, shape, data)
    return tensors


def widened(tensors):
    """As F32: a bf16 is the upper half."""
    return {
        name: (dtype, shape, data) if dtype == "F32" else
        ("F32", shape, b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
        for name, (dtype, shape, data) in tensors.items()
    }  # fmt: skip


def frequencies(c, head):
    """Of each pair of a head, by the reference code of Llama 3.1 (apply_scaling) and by linear scaling."""
    parameters = c.get("rope_parameters") or {}
    theta, scaling = parameters.get("rope_theta", c.get("rope_theta")), c.get("rope_scaling") or {}
    plain, found = [theta ** (-2 * i / head) for i in range(head // 2)], []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if scaling.get("rope_type") == "llama3":
            old, low, high = (scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
            if wavelength > old / low:
                frequency /= scaling["factor"]
            elif wavelength >= old / high:
                smooth = (old / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        elif scaling:
            frequency /= scaling["factor"]
        found.append(frequency)
    return found


def logits(c, tensors):
    """A Llama in plain Python: rows of logits, one for each token of the prompt."""
    w = {}
    for name, tensor in widened(tensors).items():
        values, shape = floats(tensor), tensor[1]
        w[name] = [values[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])] if len(shape) == 2 else values
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head = c.get("head_dim") or c["hidden_size"] // heads
    turns = frequencies(c, head)

    def dot(a, b):
        return math.fsum(x * y for x, y in zip(a, b))

    def linear(x, name):
        return [dot(row, x) for row in w[name]]

    def norm(x, name):
        scale = 1 / math.sqrt(dot(x, x) / len(x) + c["rms_norm_eps"])
        return [a * scale * g for a, g in zip(x, w[name])]

    def rotated(x, position):  # the halves are the pairs
        half, out = head // 2, list(x)
        for i in range(half):
            cosine, sine = math.cos(position * turns[i]), math.sin(position * turns[i])
            out[i], out[i + half] = x[i] * cosine - x[i + half] * sine, x[i + half] * cosine + x[i] * sine
        return out

    def cut(x):
        return [x[i : i + head] for i in range(0, len(x), head)]

    xs = [list(w["model.embed_tokens.weight"][token]) for token in TOKENS]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        inputs = [norm(x, at + "input_layernorm.weight") for x in xs]
        q, k, v = ([cut(linear(x, f"{at}self_attn.{name}_proj.weight")) for x in inputs] for name in "qkv")
        q, k = ([[rotated(h, p) for h in hs] for p, hs in enumerate(rows)] for rows in (q, k))
        for p, x in enumerate(xs):
            y = []
            for h in range(heads):
                g = h * kv_heads // heads
                scores = [dot(q[p][h], k[o][g]) / math.sqrt(head) for o in range(p + 1)]
                shares = [math.exp(s - max(scores)) for s in scores]
                y += [math.fsum(s * v[o][g][i] for o, s in enumerate(shares)) / math.fsum(shares) for i in range(head)]
            x = [a + b for a, b in zip(x, linear(y, at + "self_attn.o_proj.weight"))]
            z = norm(x, at + "post_attention_layernorm.weight")
            gate, up = linear(z, at + "mlp.gate_proj.weight"), linear(z, at + "mlp.up_proj.weight")
            fed = linear([a / (1 + math.exp(-a)) * b for a, b in zip(gate, up)], at + "mlp.down_proj.weight")
            xs[p] = [a + b for a, b in zip(x, fed)]
    output = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return [linear(norm(x, "model.norm.weight"), output) for x in xs]


def write_folder(folder, config, tensors, shards=1):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    if shards == 1:
        return write(os.path.join(folder, "model.safetensors"), tensors)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensor for n, (key, tensor) in enumerate(tensors.items()) if n % shards == i}
        write(os.path.join(folder, name), part)
        weight_map |= dict.fromkeys(part, name)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": 0}, "weight_map": weight_map}, file)


def compare(program):
    failures = 0

    def check(ok, what):
        nonlocal failures
        failures += not ok
        print(("ok      " if ok else "FAILED  ") + what)

    def gpt(*options, status=0):
        run = subprocess.run([program, f"--prompt={PROMPT}", "--max-tokens=0", "--batch=12", *options], capture_output=True,
                             text=True)  # fmt: skip
        if run.returncode != status:
            check(False, f"{' '.join(options)}: status {run.returncode} instead of {status}\n{run.stdout}{run.stderr}")
        return run

    def distance(file, expected):
        got = floats(read(file)["logits"])
        expected = [x for row in expected for x in row]
        assert len(got) == len(expected), (len(got), len(expected))
        return max(abs(a - b) for a, b in zip(got, expected)) / max(map(abs, expected))

    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, config) in enumerate(MODELS.items()):
            folder, out, again = (os.path.join(scratch, name + part) for part in ("", "-logits", "-again"))
            tensors = weights(config, number, "BF16" if name == "mistral" else "F32")
            write_folder(folder, config, tensors, 3 if name == "mistral" else 1)
            expected = logits(config, tensors)
            for mesh in ["d=1,t=1", "d=2,t=2", "d=1,t=4", "d=3,t=1"]:
                gpt("--seq=20", "--steps=0", f"--mesh={mesh}", f"--load={folder}", f"--logits={out}", f"--export={again}",
                    f"--run={scratch}/{name}-{mesh}")  # fmt: skip
                apart = distance(out, expected)
                check(apart < 1e-5, f"{name}, {mesh}: the logits of the reference ({apart:.1e} of the largest apart)")
                check(read(again + "/model.safetensors") == widened(tensors), f"{name}, {mesh}: the weights come back")
            with open(again + "/config.json") as file:
                back = json.load(file)
            gpt("--seq=20", "--steps=0", f"--load={again}", f"--logits={out}")
            check(distance(out, expected) < 1e-5, f"{name}: what was exported has the same logits")
            same = {k: v for k, v in config.items() if k in back and not k.startswith("rope")}
            same |= {"bos_token_id": 1, "max_position_embeddings": max(20, config["max_position_embeddings"])}
            wrong = {k: back[k] for k, v in same.items() if back[k] != v}
            check({"architectures", "model_type"} <= set(same) and not wrong, f"{name}: config.json {wrong}")
            check(("sliding_window" in back) == ("sliding_window" in config), f"{name}: a sliding_window where there was one")
            scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "type"}
            written = [back["rope_theta"], back["rms_norm_eps"], (back["rope_scaling"] or {}).get("factor", 1.0)]
            check((back["rope_scaling"] or {}) == scaling and all(isinstance(x, float) for x in written),
                  f"{name}: rotary positions, in floats as transformers wants them")  # fmt: skip

        folder, config = os.path.join(scratch, "llama"), MODELS["llama"]
        tensors = read(folder + "/model.safetensors")
        text, out, trained = (os.path.join(scratch, part) for part in ("text.txt", "after", "trained"))
        with open(text, "w") as file:
            file.write("In the beginning " * 20)
        gpt("--seq=20", "--steps=2", "--mesh=d=2,t=2", f"--data={text}", f"--load={folder}", f"--logits={out}",
            f"--run={scratch}/training", f"--export={trained}")  # fmt: skip
        again = gpt("--seq=20", "--steps=2", "--mesh=d=2,t=2", f"--data={text}", f"--load={folder}", f"--run={scratch}/training")
        check("note: the run in" in again.stdout, "a run that goes on says that it uses its checkpoint")
        check("--tokenizer bytes has 256 ids and the loaded model 301" in again.stdout, "and that bytes are not its tokens")
        changed = read(trained + "/model.safetensors")
        check(all(changed[name] != tensors[name] for name in tensors), "training changes every tensor")
        check(distance(out, logits(config, changed)) < 1e-5, "what is exported after training has the run's logits")

        gpt("--seq=5000", "--steps=0", f"--load={scratch}/mistral")  # null is not a window, where an absent one is 4096
        one = {k: v for k, v in MODELS["one_kv_head"].items() if k != "rope_parameters"}
        w = read(scratch + "/one_kv_head/model.safetensors")
        for form in [{"rope_theta": 300.0, "rope_parameters": {"rope_type": "default"}}, {"rope_parameters": {"type": "default"}},
                     {"rope_theta": 300, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}]:  # fmt: skip
            write_folder(scratch + "/rope", {**one, **form}, w)
            gpt("--seq=20", "--steps=0", f"--load={scratch}/rope", f"--logits={out}-rope")
            expected = logits({**one, "rope_theta": form.get("rope_theta", 10000.0), "rope_parameters": {}}, w)
            check(distance(out + "-rope", expected) < 1e-5, f"the base of {form}")

        number = 0

        def refused(what, *words, change=None, remove=(), options=(), weights=None):
            nonlocal number
            number += 1
            at = os.path.join(scratch, f"refused-{number}")
            other = {k: v for k, v in {**config, **(change or {})}.items() if k not in remove}
            write_folder(at, other, tensors if weights is None else weights)
            run = gpt("--seq=20", "--steps=0", f"--load={at}", *options, status=2)
            check(all(word in run.stderr for word in words) and run.stderr.count("error:") == 1,
                  f"refused: {what}: {run.stderr.strip()}")  # fmt: skip

        for key, value in {"attention_bias": True, "mlp_bias": True, "model_type": "qwen2", "hidden_act": "gelu",
                           "sliding_window": 19, "num_key_value_heads": 3, "bos_token_id": 301, "hidden_size": 24.5,
                           "partial_rotary_factor": 0.5, "quantization_config": {"bits": 4}, "num_attention_heads": 0,
                           "head_dim": 5, "rope_interleaved": True}.items():  # fmt: skip
            shown = "bits" if isinstance(value, dict) else json.dumps(value)
            refused(f"{key} {value}", "config.json", key, shown, change={key: value})
        for key, scaling in [("rope_type", {"rope_type": "yarn", "factor": 4.0}), ("factor", {"factor": 2.0}),
                             ("type", {"type": "longrope", "short_factor": [1.0]}),
                             ("type", {"rope_type": "linear", "type": "llama3", "factor": 4.0})]:  # fmt: skip
            refused(f"scaling {scaling}", "config.json", f"'rope_scaling.{key}'", change={"rope_scaling": scaling})
        refused("frequencies the wrong way round", "config.json", "'rope_scaling.low_freq_factor' is 4.0", "high_freq_factor",
                change={"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}})  # fmt: skip
        refused("two bases", "'rope_parameters.rope_theta' is 7.5", "10000.0, as 'rope_theta'",
                change={"rope_parameters": {"rope_theta": 7.5}})  # fmt: skip
        refused("no hidden_size", "config.json", "no 'hidden_size'", remove=["hidden_size"])
        refused("a long context", "sliding_window", "4096", "--seq 5000", options=["--seq=5000"],
                change={"model_type": "mistral", "architectures": ["MistralForCausalLM"]})  # fmt: skip
        for option, value in {"--d-head": 8, "--n-kv": 4, "--rope-factor": 4, "--layers": 3}.items():
            refused(f"{option} {value}", option, str(value), "config.json", options=[f"{option}={value}"])
        refused("--tied", "--tied", "tie_word_embeddings", options=["--tied"])
        refused("two output layers", "lm_head.weight", "model.embed_tokens.weight", change={"tie_word_embeddings": True})
        some = dict(tensors)
        del some["model.layers.1.mlp.up_proj.weight"]
        refused("a missing tensor", "model.layers.1.mlp.up_proj.weight", weights=some)
        refused("wrong shapes", "model.layers.0.mlp.up_proj.weight", "[40, 24]", "[48, 24]", change={"intermediate_size": 48})

        refused("a long prompt", "--logits", "17 tokens", "takes 10", options=["--seq=10", f"--logits={scratch}/never"])
        check("--logits: --prompt has the token 110" in gpt("--steps=0", "--vocabulary=110", f"--logits={scratch}/never",
                                                            status=2).stderr, "a prompt beyond the vocabulary")  # fmt: skip
        no_folder = gpt("--steps=0", f"--load={folder}/model.safetensors", status=2)
        check("is not a folder" in no_folder.stderr, "--load FILE")
        os.symlink(folder, scratch + "/link")
        for at in (folder, folder + "/../llama", scratch + "/link"):
            check("--export" in gpt("--seq=20", "--steps=0", f"--load={folder}", f"--run={scratch}/never", f"--export={at}",
                                    status=2).stderr, f"--export {at} over --load")  # fmt: skip
        check(read(folder + "/model.safetensors") == tensors and os.path.exists(folder + "/config.json"), "which stays as it is")
        at = os.path.join(scratch, "mistral")
        os.remove(at + "/model-00002-of-00003.safetensors")
        check("model-00002-of-00003.safetensors" in gpt("--seq=20", "--steps=0", f"--load={at}", status=2).stderr,
              "a missing shard is named")  # fmt: skip
        check("config.json" in gpt("--steps=0", f"--load={scratch}/nowhere", status=2).stderr, "a folder that is not there")
        check("--export" in gpt("--steps=0", f"--run={scratch}/never", f"--export={text}", status=2).stderr, "--export FILE")
        check("--run" in gpt("--steps=0", f"--export={scratch}/never-export", status=2).stderr, "--export without --run")
        check(not os.path.exists(f"{scratch}/never-export"), "which makes no folder")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", required=True, help="the program examples/gpt_fsdp")
    sys.exit(1 if compare(parser.parse_args().gpt) else 0)


if __name__ == "__main__":
    main()

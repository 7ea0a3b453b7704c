#!/usr/bin/env python3
"""Loads Llama, Mistral and Qwen folders in Hugging Face's layout into examples/gpt_fsdp, and compares its logits, loss and
gradients with those of an independent model, and the exported weights. The program has to refuse models that it does not
compute exactly.

llama_oracle.py --gpt PROGRAM      makes folders with random weights, and compares with tests/data/llama.safetensors; of other
                                   weights, with a model in plain Python. The standard library is enough
llama_oracle.py --update           makes this file with a model written in PyTorch (python3-torch), in double precision
"""
import json
import math
import os
import random
import struct
import tempfile

from checks import check, json_of, oracle, put, ran, records
from gpt2_oracle import DATA, floats, read, read_all, write

EXPECTED = os.path.join(DATA, "llama.safetensors")
# 301 tokens and 40 of feed_forward: no mesh divides them. Bytes are tokens; the prompt has multi-byte characters.
PROMPT = "In the begínning"
TOKENS = list(PROMPT.encode())
ROW = list((PROMPT + " wa").encode())  # of training, 20 tokens
MESHES = ["d=1,t=1", "d=2,t=2", "d=1,t=4", "d=3,t=1", "d=4,t=2", "d=1,s=2,t=2", "r=2,d=2,s=2"]
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
# As Qwen's model cards ask for longer texts: here, too, there is a pair of each kind.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3000}
# As Qwen's own: no keys for biases, windows that are shut, ids of beginning and end that no text begins with.
QWEN = {**{k: v for k, v in BASE.items() if not k.endswith("_bias")}, "use_sliding_window": False, "sliding_window": 16,
        "max_window_layers": 28, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "bos_token_id": 299, "eos_token_id": 300}
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
    "qwen2": {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True,
              "rope_scaling": YARN},
    # Heads of 8 are wider than 24 / 4. Devices that do not divide 8 pad the scales of heads' norms.
    "qwen3": {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8, "attention_bias": False,
              "sliding_window": None, "layer_types": ["full_attention"] * 2, "bos_token_id": None},
}  # fmt: skip


def dense_shapes(c):
    m, f = c["hidden_size"], c["intermediate_size"]
    return {"mlp.gate_proj": [f, m], "mlp.up_proj": [f, m], "mlp.down_proj": [m, f]}


def shapes(c, feed_forward=dense_shapes):
    m = c["hidden_size"]
    head = c.get("head_dim") or m // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    named = {"model.embed_tokens.weight": [c["vocab_size"], m], "model.norm.weight": [m]}
    for i in range(c["num_hidden_layers"]):
        named |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [m], "post_attention_layernorm": [m], "self_attn.q_proj": [q, m],
                "self_attn.k_proj": [kv, m], "self_attn.v_proj": [kv, m], "self_attn.o_proj": [m, q],
                **feed_forward(c),
            }.items()
        }  # fmt: skip
        if c["model_type"].startswith("qwen2"):
            named |= {f"model.layers.{i}.self_attn.{name}_proj.bias": [q if name == "q" else kv] for name in "qkv"}
        if c["model_type"].startswith("qwen3"):
            named |= {f"model.layers.{i}.self_attn.{name}_norm.weight": [head] for name in "qk"}
    if not c["tie_word_embeddings"]:
        named["lm_head.weight"] = [c["vocab_size"], m]
    return named


def weights(c, seed, dtype, feed_forward=dense_shapes):
    """{name: (dtype, shape, bytes)}"""
    draw, tensors = random.Random(seed), {}
    for name, shape in shapes(c, feed_forward).items():
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


def rope(c, head):
    """The frequency of each pair of a head, and the factor of cosines and sines: by the reference code of Llama 3.1
    (apply_scaling), by the paper on YaRN with the keys of transformers 5, and by linear scaling."""
    scaling = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    theta, kind = scaling.get("rope_theta", c.get("rope_theta")), scaling.get("rope_type", scaling.get("type"))
    plain = [theta ** (-2 * i / head) for i in range(head // 2)]
    if kind in (None, "default", "dynamic"):  # which is another one for longer texts only
        return plain, 1
    old = scaling.get("original_max_position_embeddings") or c["max_position_embeddings"]
    factor = scaling.get("factor") or c["max_position_embeddings"] / old

    def stretched(i):  # a share of 1 is whole
        if kind == "yarn":
            low, high = (
                head * math.log(old / (2 * math.pi * (scaling.get(name) or usual))) / (2 * math.log(theta))
                for name, usual in (("beta_fast", 32), ("beta_slow", 1))
            )
            if scaling.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head - 1)
            return min(max((i - low) / (high - low), 0), 1)
        if kind == "llama3":
            turns, low, high = (plain[i] * old / (2 * math.pi), scaling["low_freq_factor"], scaling["high_freq_factor"])
            return 1 - min(max((turns - low) / (high - low), 0), 1)
        return 1

    def amplitude(scale=1):
        return 0.1 * scale * math.log(factor) + 1

    scale = 1
    if kind == "yarn":
        both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        usual = amplitude(scaling["mscale"]) / amplitude(scaling["mscale_all_dim"]) if both else amplitude()
        scale = scaling.get("attention_factor") or usual
    return [f * (1 - stretched(i) + stretched(i) / factor) for i, f in enumerate(plain)], scale


def rows(values, shape):
    return [values[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])] if len(shape) == 2 else values


def w_of(tensors):
    return {name: rows(list(floats(tensor)), tensor[1]) for name, tensor in widened(tensors).items()}


def logits(c, tensors):
    """A Llama or Qwen in plain Python: rows of logits, one for each token of the prompt."""
    return logits_of(c, w_of(tensors), TOKENS)


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def swiglu(x, gate, up, down):
    """By matrices that are stored [out, in]."""
    y = [a / (1 + math.exp(-a)) * b for a, b in ((dot(g, x), dot(u, x)) for g, u in zip(gate, up))]
    return [dot(row, y) for row in down]


def dense(c, w, at, x):
    return swiglu(x, *(w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))


def logits_of(c, w, tokens, feed_forward=dense):
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head = c.get("head_dim") or c["hidden_size"] // heads
    turns, scale = rope(c, head)

    def linear(x, name):
        return [dot(row, x) for row in w[name]]

    def projected(x, name):  # Qwen 2 has biases, Qwen 3 a norm of each head
        y = linear(x, name + "_proj.weight")
        if c["model_type"].startswith("qwen2"):
            y = [a + b for a, b in zip(y, w[name + "_proj.bias"])]
        scaled = c["model_type"].startswith("qwen3") and not name.endswith("v")
        return [norm(h, name + "_norm.weight") if scaled else h for h in cut(y)]

    def norm(x, name):
        scale = 1 / math.sqrt(dot(x, x) / len(x) + c["rms_norm_eps"])
        return [a * scale * g for a, g in zip(x, w[name])]

    def rotated(x, position):  # the halves are the pairs
        half, out = head // 2, list(x)
        for i in range(half):
            cosine, sine = (scale * f(position * turns[i]) for f in (math.cos, math.sin))
            out[i], out[i + half] = x[i] * cosine - x[i + half] * sine, x[i + half] * cosine + x[i] * sine
        return out

    def cut(x):
        return [x[i : i + head] for i in range(0, len(x), head)]

    xs = [list(w["model.embed_tokens.weight"][token]) for token in tokens]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        inputs = [norm(x, at + "input_layernorm.weight") for x in xs]
        q, k, v = ([projected(x, f"{at}self_attn.{name}") for x in inputs] for name in "qkv")
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
            xs[p] = [a + b for a, b in zip(x, feed_forward(c, w, at, z))]
    output = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return [linear(norm(x, "model.norm.weight"), output) for x in xs]


def loss(c, w, begin, feed_forward=dense):
    """The mean over the tokens of ROW of -log p(token | those before it)."""
    total = 0
    for row, target in zip(logits_of(c, w, [begin, *ROW[:-1]], feed_forward), ROW):
        most = max(row)
        total += most + math.log(math.fsum(math.exp(x - most) for x in row)) - row[target]
    return total / len(ROW)


def tensors_of(number, name):
    return weights(MODELS[name], number, "BF16" if name == "mistral" else "F32")


def begin_of(c):
    """The input before the first token of a row."""
    begin = c.get("bos_token_id", 1)
    return 0 if begin is None else begin


def directions(name, tensors):
    """One in the space of each tensor."""
    draw = random.Random(name)
    return {key: [draw.gauss(0, 1) for _ in range(math.prod(shape))] for key, (_, shape, _) in tensors.items()}


def update():
    import torch  # only here: the comparison needs no PyTorch
    from torch.nn.functional import cross_entropy, linear, silu

    def logits_by_torch(c, w, tokens):
        heads, length = c["num_attention_heads"], len(tokens)
        head = c.get("head_dim") or c["hidden_size"] // heads
        turns, scale = rope(c, head)
        angles = torch.outer(torch.arange(length).double(), torch.tensor(turns, dtype=torch.double)).repeat(1, 2)
        cosines, sines = scale * angles.cos(), scale * angles.sin()
        visible = torch.ones(length, length, dtype=torch.bool).tril()

        def norm(x, name):
            return x * (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * w[name]

        def projected(x, name):  # [heads, tokens, head]
            y = linear(x, w[name + "_proj.weight"], w.get(name + "_proj.bias")).reshape(length, -1, head).transpose(0, 1)
            return norm(y, name + "_norm.weight") if name + "_norm.weight" in w else y

        def rotated(x):
            first, second = x.chunk(2, -1)
            return x * cosines + torch.cat([-second, first], -1) * sines

        def each(x):  # query head its key-value head
            return x.repeat_interleave(heads // c["num_key_value_heads"], 0)

        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            y = norm(x, at + "input_layernorm.weight")
            q, k, v = (projected(y, f"{at}self_attn.{name}") for name in "qkv")
            scores = rotated(q) @ each(rotated(k)).transpose(1, 2) / math.sqrt(head)
            attended = scores.masked_fill(~visible, -math.inf).softmax(-1) @ each(v)
            x = x + linear(attended.transpose(0, 1).reshape(length, -1), w[at + "self_attn.o_proj.weight"])
            gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            z = norm(x, at + "post_attention_layernorm.weight")
            x = x + linear(silu(linear(z, gate)) * linear(z, up), down)
        return linear(norm(x, "model.norm.weight"), w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"])

    stored, numbers = {}, {}
    for number, (name, c) in enumerate(MODELS.items()):
        tensors = tensors_of(number, name)
        w = {key: torch.tensor(floats(tensor), dtype=torch.double).reshape(tensor[1]).requires_grad_()
             for key, tensor in widened(tensors).items()}  # fmt: skip
        rows = logits_by_torch(c, w, TOKENS)
        stored[name] = "F32", list(rows.shape), rows.detach().float().numpy().tobytes()
        loss = cross_entropy(logits_by_torch(c, w, [begin_of(c), *ROW[:-1]]), torch.tensor(ROW))
        loss.backward()
        along = {key: (w[key].grad.flatten() @ torch.tensor(d, dtype=torch.double)).item() for key, d in directions(name, tensors).items()}
        numbers[name] = json.dumps({"loss": loss.item(), "derivatives": along})
    write(EXPECTED, stored, numbers)


def write_folder(folder, config, tensors, shards=1):
    os.makedirs(folder, exist_ok=True)
    put(os.path.join(folder, "config.json"), json.dumps(config))
    if shards == 1:
        return write(os.path.join(folder, "model.safetensors"), tensors)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensor for n, (key, tensor) in enumerate(tensors.items()) if n % shards == i}
        write(os.path.join(folder, name), part)
        weight_map |= dict.fromkeys(part, name)
    put(os.path.join(folder, "model.safetensors.index.json"), json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def distance(file, expected):
    """The greatest difference of a file of logits from rows of them, as a part of the greatest logit."""
    got = floats(read(file)["logits"])
    expected = [x for row in expected for x in row]
    assert len(got) == len(expected), (len(got), len(expected))
    return max(abs(a - b) for a, b in zip(got, expected)) / max(map(abs, expected))


def model_of(program):
    """Runs it with options; it must end with a status."""
    return lambda *options, status=0: ran(status, program, f"--prompt={PROMPT}", "--max-tokens=0", "--batch=12", "--seq=20", *options)


def there_and_back(model, scratch, name, config, tensors, expected, meshes, shards):
    """Loads a folder of `shards` files and exports it into "{scratch}/{name}-again", on each mesh: it gives the expected logits,
    and the weights back. Returns the config.json that it writes."""
    folder, out, again = (os.path.join(scratch, name + part) for part in ("", "-logits", "-again"))
    write_folder(folder, config, tensors, shards)
    for mesh in meshes:
        model("--steps=0", f"--mesh={mesh}", f"--load={folder}", f"--logits={out}", f"--export={again}",
              f"--run={scratch}/{name}-{mesh}")  # fmt: skip
        apart = distance(out, expected)
        check(apart < 1e-5, f"{name}, {mesh}: the logits of the reference ({apart:.1e} of the largest apart)")
        check(read(again + "/model.safetensors") == widened(tensors), f"{name}, {mesh}: the weights come back")
    model("--steps=0", f"--load={again}", f"--logits={out}")
    check(distance(out, expected) < 1e-5, f"{name}: what was exported has the same logits")
    return json_of(again + "/config.json")


def check_loss(what, folder, due):
    """The first loss of a run."""
    found = next(step["loss"] for step in records(folder, "metrics.jsonl") if "loss" in step)
    check(abs(found - due) < 1e-5 * due, f"{what}: the loss {found} is the reference's, {due}")


def check_refused(model, scratch, what, config, tensors, words, options):
    """A folder that the program does not take: the one line of error has the words."""
    at = tempfile.mkdtemp(dir=scratch)
    write_folder(at, config, tensors)
    said = model("--steps=0", f"--load={at}", *options, status=2).stderr
    check(all(word in said for word in words) and said.count("error:") == 1, f"refused: {what}: {said.strip()}")


def compare(program):
    gpt = model_of(program)
    numbers, by_torch = read_all(EXPECTED)

    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, config) in enumerate(MODELS.items()):
            tensors, expected = tensors_of(number, name), rows(floats(by_torch[name]), by_torch[name][1])
            back = there_and_back(gpt, scratch, name, config, tensors, expected, MESHES, 3 if name == "mistral" else 1)
            apart = max(abs(a - b) for pair in zip(logits(config, tensors), expected) for a, b in zip(*pair))
            check(apart < 1e-6, f"{name}: the model in plain Python has PyTorch's logits ({apart:.1e} apart)")
            same = {k: v for k, v in config.items() if k in back and not k.startswith("rope")}
            same |= {"bos_token_id": config.get("bos_token_id", 1), "max_position_embeddings": max(20, config["max_position_embeddings"])}
            wrong = {k: back[k] for k, v in same.items() if back[k] != v}
            check({"architectures", "model_type"} <= set(same) and not wrong, f"{name}: config.json {wrong}")
            check(("sliding_window" in back) == ("sliding_window" in config), f"{name}: a sliding_window where there was one")
            scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "type"}
            written = [back["rope_theta"], back["rms_norm_eps"], (back["rope_scaling"] or {}).get("factor", 1.0)]
            check((back["rope_scaling"] or {}) == scaling and all(isinstance(x, float) for x in written),
                  f"{name}: rotary positions, in floats as transformers wants them")  # fmt: skip

        # A step of AdamW whose epsilon is 1, with a rate of 1 and no decay, takes g / (|g| + 1) from each weight.
        text = os.path.join(scratch, "rows.txt")
        put(text, bytes(ROW) * 100)
        for number, name in enumerate(MODELS):
            tensors, due = widened(tensors_of(number, name)), json.loads(numbers[name])
            for mesh in MESHES:
                at = f"{scratch}/{name}-step-{mesh}"
                gpt("--steps=1", f"--mesh={mesh}", f"--load={scratch}/{name}", f"--data={text}", f"--run={at}",
                    f"--export={at}-export", "--adam-epsilon=1", "--learning-rate=1", "--lr-schedule=constant", "--warmup=0",
                    "--weight-decay=0", "--clip=0")  # fmt: skip
                check_loss(f"{name}, {mesh}", at, due["loss"])
                after = read(at + "-export/model.safetensors")
                for key, direction in directions(name, tensors).items():
                    steps = [a - b for a, b in zip(floats(tensors[key]), floats(after[key]))]
                    parts = [x / (1 - abs(x)) * d for x, d in zip(steps, direction)]
                    size = math.sqrt(math.fsum(p * p for p in parts))
                    apart = abs(math.fsum(parts) - due["derivatives"][key])
                    check(size > 1e-4 and apart < 1e-4 * size,
                          f"{name}, {mesh}, {key}: the gradient ({apart:.1e} from PyTorch's along a direction, its size is {size:.1e})")  # fmt: skip

        folder, config = os.path.join(scratch, "llama"), MODELS["llama"]
        tensors = read(folder + "/model.safetensors")
        text, out, trained = (os.path.join(scratch, part) for part in ("text.txt", "after", "trained"))
        put(text, "In the beginning " * 20)
        gpt("--steps=2", "--mesh=d=2,t=2", f"--data={text}", f"--load={folder}", f"--logits={out}",
            f"--run={scratch}/training", f"--export={trained}")  # fmt: skip
        again = gpt("--steps=2", "--mesh=d=2,t=2", f"--data={text}", f"--load={folder}", f"--run={scratch}/training")
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
            gpt("--steps=0", f"--load={scratch}/rope", f"--logits={out}-rope")
            expected = logits({**one, "rope_theta": form.get("rope_theta", 10000.0), "rope_parameters": {}}, w)
            check(distance(out + "-rope", expected) < 1e-5, f"the base of {form}")
        fast = {"rope_type": "yarn", "rope_theta": 500.0, "beta_fast": 4.0, "beta_slow": 0.5, "factor": 8.0}
        for positions, key, form in [
            (2048, "rope_parameters", {**fast, "original_max_position_embeddings": 40, "truncate": False}),
            (320, "rope_scaling", {**fast, "original_max_position_embeddings": 40, "mscale": 0.7, "mscale_all_dim": 1.5}),
            (80, "rope_scaling", {**fast, "original_max_position_embeddings": 20, "factor": None, "attention_factor": 0.75}),
            (19, "rope_scaling", {"type": "yarn", "factor": 2.5, "mscale": 0.7, "beta_slow": None}),
            (20, "rope_scaling", {"type": "dynamic", "factor": 2.5})]:  # fmt: skip
            other = {**one, "rope_theta": 500.0, "max_position_embeddings": positions, key: form}
            write_folder(scratch + "/rope", other, w)
            gpt("--steps=0", f"--load={scratch}/rope", f"--logits={out}-rope", f"--run={scratch}/rope-{positions}",
                f"--export={scratch}/rope-again")  # fmt: skip
            apart = distance(out + "-rope", logits(other, w))
            check(apart < 1e-5, f"rotary positions of {form} ({apart:.1e} apart)")
            back = json_of(scratch + "/rope-again/config.json")
            given = {k: v for k, v in form.items() if k not in ("type", "rope_theta") and v is not None}
            written = back["rope_scaling"]
            check(back["rope_theta"] == 500 and {k: written.get(k) for k in given} == given
                  and written["rope_type"] == form.get("rope_type", form.get("type")), f"{form} is exported as {written}")  # fmt: skip
            gpt("--steps=0", f"--load={scratch}/rope-again", f"--logits={out}-again")
            check(read(out + "-again") == read(out + "-rope"), f"what {form} is exported as has the same logits")
        # A run without --load has the same angles, and exports them.
        at = scratch + "/new-yarn"
        gpt("--steps=0", f"--run={at}", f"--export={at}-export", f"--logits={out}-new", "--rope-yarn", "--rope-context=40",
            "--rope-factor=8", "--rope-beta-fast=4", "--rope-beta-slow=0.5", "--no-rope-truncate", "--rope-base=500",
            "--layers=1", "--d-model=24", "--n-kv=2", "--n-q-per-kv=2", "--d-head=6", "--d-ff=40")  # fmt: skip
        new = json_of(at + "-export/config.json")
        check(distance(out + "-new", logits(new, read(at + "-export/model.safetensors"))) < 1e-5, "a new model with YaRN is exported")
        check(new["rope_scaling"]["rope_type"] == "yarn" and new["rope_scaling"]["truncate"] is False, "with its keys")
        gpt("--steps=0", f"--config={at}/config.toml", f"--run={at}", f"--logits={out}-new-again")
        check(read(out + "-new-again") == read(out + "-new"), "config.toml has the rotary positions too")
        said = gpt("--steps=1", f"--config={at}/config.toml", f"--run={at}", "--rope-beta-slow=1", f"--data={text}", status=2).stderr
        check("rope_beta_slow" in said, f"a run does not go on with other ones: {said.strip()}")

        def refused(what, *words, base=config, change=None, remove=(), options=(), weights=None):
            other = {k: v for k, v in {**base, **(change or {})}.items() if k not in remove}
            check_refused(gpt, scratch, what, other, tensors if weights is None else weights, words, options)

        for key, value in {"attention_bias": True, "mlp_bias": True, "model_type": "qwen2_moe", "hidden_act": "gelu",
                           "sliding_window": 19, "num_key_value_heads": 3, "bos_token_id": 301, "hidden_size": 24.5,
                           "partial_rotary_factor": 0.5, "quantization_config": {"bits": 4}, "num_attention_heads": 0,
                           "head_dim": 5, "rope_interleaved": True}.items():  # fmt: skip
            shown = "bits" if isinstance(value, dict) else json.dumps(value)
            refused(f"{key} {value}", "config.json", key, shown, change={key: value})
        for key, scaling in [("factor", {"factor": 2.0}), ("beta_slow", {**YARN, "beta_slow": 32}),
                             ("attention_factor", {**YARN, "attention_factor": 0.0}), ("mscale", {**YARN, "mscale": True}),
                             ("type", {"type": "longrope", "short_factor": [1.0]}),
                             ("type", {"rope_type": "linear", "type": "llama3", "factor": 4.0})]:  # fmt: skip
            refused(f"scaling {scaling}", "config.json", f"'rope_scaling.{key}'", change={"rope_scaling": scaling})
        for shown, scaling in ("absent", {"rope_type": "yarn"}), ("1.0", {**LLAMA3, "factor": 1.0}):
            refused(f"scaling {scaling}", "config.json", f"'rope_scaling.factor' is {shown}", "above 1", change={"rope_scaling": scaling})
        refused("newer scaling without a factor", "config.json", "no 'rope_parameters.factor'", remove=["rope_scaling"],
                change={"rope_parameters": {"rope_type": "linear"}})  # fmt: skip
        refused("two architectures", "config.json", "'architectures' is [\"LlamaForCausalLM\"]", "Qwen2ForCausalLM",
                change={"model_type": "qwen2"})  # fmt: skip
        for name, change, *words in [
            ("qwen2", {"use_sliding_window": True}, "'sliding_window' is 16", "--seq 20"),
            ("qwen2", {"use_sliding_window": 1}, "'use_sliding_window' is 1"),
            ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'", "full_attention", "2 layers"),
            ("qwen2", {"attention_bias": True}, "'attention_bias' (true)"),
            ("qwen2", {"num_experts": 60}, "'num_experts' (60)"),
            ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "'rope_scaling.type'", "mrope"),
            ("qwen3", {"attention_bias": True}, "'attention_bias' is true"),
            ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 19}, "'rope_scaling.rope_type'",
             "--seq", "which is 20", "'max_position_embeddings'", "which is 19"),
            ("qwen3", {"head_dim": None}, "self_attn.q_proj.weight", "[512, 24]"),
            ("qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "layer_types": None,
                       "use_sliding_window": None, "max_window_layers": None}, "q_norm.weight"),
        ]:  # fmt: skip
            refused(f"{name} {change}", "config.json" if "weight" not in words[0] else "", *words,
                    weights=read(f"{scratch}/{name}/model.safetensors"), base=MODELS[name], change=change)  # fmt: skip
        refused("qwen2 without num_key_value_heads", "config.json", "'num_key_value_heads' is absent", "32",
                base=MODELS["qwen2"], remove=["num_key_value_heads"])  # fmt: skip
        for name, option in [("llama", "--qkv-bias"), ("qwen2", "--qk-norm")]:
            at = f"{scratch}/{name}"
            words = gpt("--steps=0", f"--load={at}", option, status=2).stderr
            check(option in words and "model_type" in words, f"refused: {option} with {name}: {words.strip()}")
        check("--qk-norm" in gpt("--steps=0", "--qkv-bias", "--qk-norm", f"--run={scratch}/never", f"--export={scratch}/never-export",
                                 status=2).stderr, "--export of both, which no class has")  # fmt: skip
        at = scratch + "/window"
        write_folder(at, {**MODELS["qwen2"], "use_sliding_window": True, "sliding_window": 20,
                          "layer_types": ["full_attention", "sliding_attention"]}, read(scratch + "/qwen2/model.safetensors"))  # fmt: skip
        gpt("--steps=0", f"--load={at}")  # a window that no row reaches
        for option, kind in [("--qkv-bias", "qwen2"), ("--qk-norm", "qwen3")]:
            at = f"{scratch}/new-{kind}"
            gpt("--steps=1", f"--data={text}", f"--run={at}", f"--export={at}-export", option, "--layers=1")
            back = json_of(at + "-export/config.json")
            run = gpt("--steps=0", f"--load={at}-export")
            check(back["model_type"] == kind and run.returncode == 0, f"a model with {option} is exported as {kind}")
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
            check("--export" in gpt("--steps=0", f"--load={folder}", f"--run={scratch}/never", f"--export={at}",
                                    status=2).stderr, f"--export {at} over --load")  # fmt: skip
        check(read(folder + "/model.safetensors") == tensors and os.path.exists(folder + "/config.json"), "which stays as it is")
        at = os.path.join(scratch, "mistral")
        os.remove(at + "/model-00002-of-00003.safetensors")
        check("model-00002-of-00003.safetensors" in gpt("--steps=0", f"--load={at}", status=2).stderr,
              "a missing shard is named")  # fmt: skip
        check("config.json" in gpt("--steps=0", f"--load={scratch}/nowhere", status=2).stderr, "a folder that is not there")
        check("--export" in gpt("--steps=0", f"--run={scratch}/never", f"--export={text}", status=2).stderr, "--export FILE")
        check("--run" in gpt("--steps=0", f"--export={scratch}/never-export", status=2).stderr, "--export without --run")
        check(not os.path.exists(f"{scratch}/never-export"), "which makes no folder")


if __name__ == "__main__":
    oracle("gpt", compare, update)

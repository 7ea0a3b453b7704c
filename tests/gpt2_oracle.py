#!/usr/bin/env python3
"""Loads GPT-2 weights in Hugging Face's layout into examples/gpt2, compares its logits, loss and gradients with those of an
independent GPT-2, and compares the exported weights.

gpt2_oracle.py --gpt2 PROGRAM      compares with tests/data/gpt2_{weights,logits,gradients}.safetensors; standard library only
gpt2_oracle.py --update            makes these files with a GPT-2 written in PyTorch (python3-torch), random weights
"""
import json
import math
import os
import struct
import tempfile

from checks import check, contents, json_of, oracle, put, ran, records

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
WEIGHTS, LOGITS, GRADIENTS = (os.path.join(DATA, f"gpt2_{name}.safetensors") for name in ("weights", "logits", "gradients"))
# 301 tokens: no mesh divides them, and 4x4 neither width nor heads. Bytes are tokens; the prompt has multi-byte characters.
SIZES = {"layers": 2, "d_model": 24, "heads": 4, "d_ff": 96, "context": 20, "vocabulary": 301}
PROMPT = "In the begínning"
ROW = list((PROMPT + " wa").encode())  # of training, 20 tokens; id 0 is the input before the first
MESHES = ["d=1,t=1", "d=2,t=2", "d=1,t=4", "d=3,t=1", "d=4,t=4"]


def write(path, tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}; metadata: {key: text}"""
    header, offset = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    put(path, struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read(path):
    return read_all(path)[1]


def read_all(path):
    """The metadata, and the tensors as `write` takes them."""
    content = contents(path)
    length = struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], content[8 + length + begin : 8 + length + end])
    return metadata, tensors


def floats(tensor):
    dtype, _, data = tensor
    assert dtype == "F32", dtype
    return struct.unpack(f"<{len(data) // 4}f", data)


def update():
    import torch  # only here: the comparison needs no PyTorch

    s = SIZES
    generator = torch.Generator().manual_seed(1)
    m, f = s["d_model"], s["d_ff"]
    shapes = {"wte.weight": [s["vocabulary"], m], "wpe.weight": [s["context"], m]}
    for i in range(s["layers"]):
        shapes |= {
            f"h.{i}.{name}": shape
            for name, shape in {
                "ln_1.weight": [m], "ln_1.bias": [m], "attn.c_attn.weight": [m, 3 * m], "attn.c_attn.bias": [3 * m],
                "attn.c_proj.weight": [m, m], "attn.c_proj.bias": [m], "ln_2.weight": [m], "ln_2.bias": [m],
                "mlp.c_fc.weight": [m, f], "mlp.c_fc.bias": [f], "mlp.c_proj.weight": [f, m], "mlp.c_proj.bias": [m],
            }.items()
        }  # fmt: skip
    shapes |= {"ln_f.weight": [m], "ln_f.bias": [m]}
    w = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}

    def logits_of(tokens, w):
        def norm(x, name):
            return torch.nn.functional.layer_norm(x, [m], w[name + ".weight"], w[name + ".bias"], 1e-5)

        def linear(x, name):
            return x @ w[name + ".weight"] + w[name + ".bias"]

        length = len(tokens)
        x = w["wte.weight"][tokens] + w["wpe.weight"][:length]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for i in range(s["layers"]):
            q, k, v = (
                part.reshape(length, s["heads"], -1).transpose(0, 1)
                for part in linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(m, dim=-1)
            )
            scores = (q @ k.transpose(1, 2) / math.sqrt(m // s["heads"])).masked_fill(~mask, float("-inf"))
            heads = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, m)
            x = x + linear(heads, f"h.{i}.attn.c_proj")
            up = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
            gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            x = x + linear(gelu, f"h.{i}.mlp.c_proj")
        return norm(x, "ln_f") @ w["wte.weight"].T

    def stored(t):
        return "F32", list(t.shape), t.detach().float().contiguous().numpy().tobytes()

    logits = logits_of(torch.tensor(list(PROMPT.encode())), w)
    exact = {name: t.double().requires_grad_() for name, t in w.items()}
    loss = torch.nn.functional.cross_entropy(logits_of(torch.tensor([0, *ROW[:-1]]), exact), torch.tensor(ROW))
    loss.backward()
    os.makedirs(DATA, exist_ok=True)
    write(WEIGHTS, {name: stored(t) for name, t in w.items()})
    write(LOGITS, {"logits": stored(logits)})
    write(GRADIENTS, {name: stored(t.grad) for name, t in exact.items()}, {"loss": repr(loss.item())})


def refused(what, words, *command):
    said = ran(2, *command).stderr
    check(all(word in said for word in words), what, said)


def compare(program):
    expected = floats(read(LOGITS)["logits"])
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        put(text, "In the beginning " * 20)
        common = [program, *sizes, f"--data={text}", "--seq=20", "--steps=0", "--max-tokens=0", f"--prompt={PROMPT}"]
        for mesh in MESHES:
            out, run = os.path.join(folder, "logits"), os.path.join(folder, "run-" + mesh)
            again = os.path.join(folder, "weights")
            ran(0, *common, "--batch=12", f"--mesh={mesh}", f"--load={WEIGHTS}", f"--logits={out}", f"--run={run}", f"--export={again}")
            got = read(out)
            check(got["logits"][1] == [len(PROMPT.encode()), SIZES["vocabulary"]], f"{mesh}: shape of the logits")
            apart = max(abs(a - b) for a, b in zip(floats(got["logits"]), expected))
            check(apart < 1e-4, f"{mesh}: logits as PyTorch's ({apart:.1e} apart, the largest is {max(expected):.1f})")
            check(read(again + "/model.safetensors") == read(WEIGHTS), f"{mesh}: the exported weights are the same bits")
        # A step of AdamW whose epsilon is 1, with a rate of 1 and no decay, takes g / (|g| + 1) from each weight.
        about, due = read_all(GRADIENTS)
        put(text, bytes(ROW) * 100)
        for mesh in MESHES:
            run, after = os.path.join(folder, "step-" + mesh), os.path.join(folder, "stepped")
            ran(0, *(option for option in common if option != "--steps=0"), "--steps=1", "--batch=12", f"--mesh={mesh}", f"--load={WEIGHTS}", f"--run={run}", f"--export={after}",
                "--adam-epsilon=1", "--learning-rate=1", "--lr-schedule=constant", "--warmup=0", "--weight-decay=0", "--clip=0")  # fmt: skip
            loss = next(step["loss"] for step in records(run, "metrics.jsonl") if "loss" in step)
            check(abs(loss - float(about["loss"])) < 1e-6 * loss, f"{mesh}: the loss {loss} is PyTorch's, {about['loss']}")
            moved = read(after + "/model.safetensors")
            for name, before in read(WEIGHTS).items():
                steps = [a - b for a, b in zip(floats(before), floats(moved[name]))]
                pairs = [(x / (1 - abs(x)), y) for x, y in zip(steps, floats(due[name]))]
                apart, largest = max(abs(x - y) for x, y in pairs), max(abs(y) for _, y in pairs)
                check(apart < 1e-6 and largest > 1e-3, f"{mesh}, {name}: the gradient ({apart:.1e} apart, the largest is {largest:.1e})")
        put(text, "In the beginning " * 20)
        # The folder gives the sizes too.
        bare = [option for option in common if option not in sizes]
        ran(0, *bare, f"--load={again}", f"--logits={out}")
        apart = max(abs(a - b) for a, b in zip(floats(read(out)["logits"]), expected))
        check(apart < 1e-4, f"the exported folder: logits as PyTorch's ({apart:.1e} apart)")
        config = json_of(again + "/config.json")
        check((config["n_layer"], config["n_head"], config["n_inner"]) == (2, 4, 96), "config.json has the sizes")
        check(all(isinstance(config[key], float) for key in ("resid_pdrop", "embd_pdrop", "layer_norm_epsilon")), "and floats")
        kept, unchanged = {"bos_token_id": 7, "eos_token_id": None}, {"n_special": 0, "predict_special_tokens": True}
        unchanged |= {"_attn_implementation_autoset": True, "transformers.js_config": {"dtype": "q4"}, "use_cache": True}
        unchanged |= {"output_past": True, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        put(again + "/config.json", json.dumps({**config, **kept, **unchanged}))
        run = ran(0, *bare, f"--load={again}", f"--run={folder}/kept-run", f"--export={folder}/kept")
        check("bytes has 256 ids and the loaded model 301" in run.stdout, "a note of the tokenizer")
        back = json_of(folder + "/kept/config.json")
        check({key: back[key] for key in kept} == kept, "an export keeps the ids of beginning and end")
        for load in (f"{folder}/kept", f"{folder}/kept/model.safetensors"):
            refused("--export over --load is refused", ["--export", "--load"],
                    *common, f"--load={load}", f"--run={folder}/kept-run", f"--export={folder}/kept")  # fmt: skip
        run = ran(0, *bare, f"--load={folder}/kept", f"--run={folder}/kept-run")
        check("note: the run in" in run.stdout, "a run that goes on says that it uses its checkpoint")
        refused("a long prompt is refused", ["--logits", "takes 20"], *bare, f"--load={again}", "--logits=never", f"--prompt={PROMPT * 2}")
        for key, value in {"activation_function": "relu", "scale_attn_weights": False, "model_type": "gpt_neo",
                           "vocab_size": 300.5, "unheard_of": 1, "n_head": 5}.items():  # fmt: skip
            put(again + "/config.json", json.dumps({**config, key: value}))
            refused(f"config.json with {key} {value} is refused", [key], *bare, f"--load={again}")
        put(again + "/config.json", json.dumps(config))
        refused("another number of heads is refused", ["--heads is 3 (command line)"], *bare, f"--load={again}", "--heads=3")
        out = os.path.join(folder, "bf16")
        ran(0, *common, f"--load={WEIGHTS}", f"--logits={out}", "--dtype=bf16")
        apart = max(abs(a - b) for a, b in zip(floats(read(out)["logits"]), expected)) / max(map(abs, expected))
        check(1e-5 < apart < 0.03, f"bf16: logits within 3 % of the largest ({apart:.1%})")
        broken = read(WEIGHTS)
        del broken["h.1.mlp.c_fc.bias"]
        write(os.path.join(folder, "broken"), broken)
        refused("a missing tensor is named", ["h.1.mlp.c_fc.bias"], *common, f"--load={folder}/broken")
        tied = read(WEIGHTS)
        dtype, shape, data = tied["wte.weight"]
        for what, output, status in (("tied", data, 0), ("of its own", data[:-4] + b"\0\0\0\0", 2)):
            write(os.path.join(folder, "output"), {**tied, "lm_head.weight": (dtype, shape, output)})
            said = ran(status, *common, f"--load={folder}/output").stderr
            named = "lm_head.weight" in said and "wte.weight" in said
            check(named == (status != 0), f"an output layer {what}: status {status}")
        for option in ("--norm=post", "--activation=relu", "--no-tied"):
            for file in (f"--load={WEIGHTS}", f"--export={folder}/never"):
                wanted = option.replace("=post", " pre").replace("=relu", " gelu").replace("no-tied", "tied")
                refused(f"{file.split('=')[0]} {option} is refused", [wanted], *common, f"--run={folder}/never-run", file, option)
                check(not os.path.exists(f"{folder}/never"), f"{file.split('=')[0]} {option} writes nothing")


if __name__ == "__main__":
    oracle("gpt2", compare, update)

#!/usr/bin/env python3
"""Loads Mixtral, Qwen2-MoE and Qwen3-MoE folders in Hugging Face's layout into examples/moe, and compares its logits and loss
with those of an independent model, and the exported weights. The program has to refuse models that it does not compute exactly.

moe_oracle.py --moe PROGRAM        makes folders with random weights, and computes their logits in double precision; Python's
                                   standard library is enough
"""
import json
import math
import os
import tempfile

from checks import arguments, check, finish, put
from gpt2_oracle import read
from llama_oracle import (BASE, QWEN, ROW, TOKENS, YARN, check_loss, check_refused, dot, logits_of, loss, model_of, swiglu,
                          there_and_back, w_of, weights)  # fmt: skip

QWEN_MOE = {**QWEN, "num_experts": 4, "moe_intermediate_size": 10, "decoder_sparse_step": 1, "output_router_logits": False,
            "router_aux_loss_coef": 0.001}  # fmt: skip
MODELS = {
    "mixtral": {**{k: v for k, v in BASE.items() if not k.endswith("_bias")}, "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12,
                "sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False},
    # As Qwen1.5-MoE: the weights of a token's experts do not add up to 1. The last key has no layer that it is for.
    "qwen2_moe": {**QWEN_MOE, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts_per_tok": 2,
                  "shared_expert_intermediate_size": 14, "norm_topk_prob": False, "intermediate_size": 77},
    "qwen3_moe": {**QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 3,
                  "norm_topk_prob": True, "head_dim": 8, "mlp_only_layers": [], "bos_token_id": None, "sliding_window": None,
                  "rope_scaling": YARN},
}  # fmt: skip
MESHES = ["d=1", "d=2,e=2", "e=2,t=3", "e=2,s=2"]


def is_mixtral(c):
    return c["model_type"] == "mixtral"


def names(c):
    """Of router, and of an expert's gate, up and down."""
    if is_mixtral(c):
        return "block_sparse_moe.gate", [f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2")]
    return "mlp.gate", [f"mlp.experts.{{}}.{w}_proj" for w in ("gate", "up", "down")]


def experts_of(c):
    return c["num_local_experts"] if is_mixtral(c) else c["num_experts"]


def moe_shapes(c):
    m, f = c["hidden_size"], c["intermediate_size" if is_mixtral(c) else "moe_intermediate_size"]
    router, expert = names(c)
    found = {router: [experts_of(c), m]}
    for i in range(experts_of(c)):
        found |= dict(zip((name.format(i) for name in expert), ([f, m], [f, m], [m, f])))
    if shared := c.get("shared_expert_intermediate_size"):
        found |= {"mlp.shared_expert_gate": [1, m], "mlp.shared_expert.gate_proj": [shared, m],
                  "mlp.shared_expert.up_proj": [shared, m], "mlp.shared_expert.down_proj": [m, shared]}  # fmt: skip
    return found


def mixture(c, w, at, x):
    router, expert = names(c)
    scores = [math.exp(dot(row, x)) for row in w[f"{at}{router}.weight"]]
    shares = [s / math.fsum(scores) for s in scores]
    best = sorted(range(len(shares)), key=lambda i: -shares[i])[: c["num_experts_per_tok"]]
    whole = math.fsum(shares[i] for i in best) if c.get("norm_topk_prob", is_mixtral(c)) else 1
    parts = []
    for i in best:
        y = swiglu(x, *(w[f"{at}{name.format(i)}.weight"] for name in expert))
        parts.append([shares[i] / whole * a for a in y])
    if "shared_expert_intermediate_size" in c:
        gate = 1 / (1 + math.exp(-dot(w[at + "mlp.shared_expert_gate.weight"][0], x)))
        y = swiglu(x, *(w[f"{at}mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
        parts.append([gate * a for a in y])
    return [math.fsum(column) for column in zip(*parts)]


def compare(program):
    moe = model_of(program)
    with tempfile.TemporaryDirectory() as scratch:
        text = os.path.join(scratch, "rows.txt")
        put(text, bytes(ROW) * 100)
        for number, (name, config) in enumerate(MODELS.items()):
            tensors = weights(config, number, "BF16" if name == "mixtral" else "F32", moe_shapes)
            w = w_of(tensors)
            expected = logits_of(config, w, TOKENS, mixture)
            back = there_and_back(moe, scratch, name, config, tensors, expected, MESHES, 3 if name == "mixtral" else 1)
            changed = {k: back[k] for k, v in config.items() if k in back and back[k] != v}
            check(not changed, f"{name}: config.json {changed}")
            at = f"{scratch}/{name}-step"
            moe("--steps=1", "--mesh=e=2", f"--load={scratch}/{name}", f"--data={text}", f"--run={at}")
            check_loss(name, at, loss(config, w, config["bos_token_id"] or 0, mixture))

        def refused(name, *words, change=None, remove=(), options=(), without=None):
            tensors = read(f"{scratch}/{name}-again/model.safetensors")
            if without:
                del tensors[without]
            other = {k: v for k, v in {**MODELS[name], **(change or {})}.items() if k not in remove}
            check_refused(moe, scratch, f"{name} {change or remove or options or without}", other, tensors, words, options)

        for name, key, value in [("mixtral", "tie_word_embeddings", True), ("mixtral", "router_jitter_noise", 0.1),
                                 ("qwen2_moe", "mlp_only_layers", [0]), ("qwen2_moe", "decoder_sparse_step", 2),
                                 ("qwen2_moe", "qkv_bias", False), ("qwen3_moe", "attention_bias", True),
                                 ("qwen3_moe", "n_shared_experts", 1), ("mixtral", "num_experts", 6)]:  # fmt: skip
            refused(name, "config.json", key, json.dumps(value), change={key: value})
        refused("mixtral", "config.json", '"llama"', '"mixtral" or "qwen2_moe" or "qwen3_moe"',
                change={"model_type": "llama", "architectures": ["LlamaForCausalLM"]})  # fmt: skip
        # What is absent has transformers' values, which are other ones.
        refused("qwen2_moe", "experts.0.gate_proj.weight", "[10, 24]", "[1408, 24]", remove=["moe_intermediate_size"])
        refused("mixtral", "experts.6.w1.weight", "is not in the folder", remove=["num_local_experts"])
        refused("mixtral", "experts.5.w3.weight", "is in the folder", change={"num_local_experts": 5})
        refused("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj.weight", "is not in the folder",
                without="model.layers.1.mlp.experts.3.down_proj.weight")  # fmt: skip
        refused("mixtral", "--experts is 3", "num_local_experts", options=["--experts=3"])
        refused("mixtral", "--experts 6", "axis e", options=["--mesh=e=4"])
        refused("qwen2_moe", "--shared-gate", "model_type", options=["--no-shared-gate"])
        for options, word in [(["--shared=8"], "--qkv-bias"), (["--qkv-bias"], "--shared-gate"),
                              (["--qk-norm", "--qkv-bias"], "both"), (["--no-norm-topk-prob"], "Mixtral")]:  # fmt: skip
            words = moe("--steps=0", f"--run={scratch}/never", f"--export={scratch}/never-export", *options, status=2).stderr
            check("--export" in words and word in words, f"--export of what no class has: {words.strip()}")
        check("--shared-gate" in moe("--steps=0", "--shared-gate", status=2).stderr, "a gate of nothing")


def main():
    compare(arguments("moe").moe)
    finish()


if __name__ == "__main__":
    main()

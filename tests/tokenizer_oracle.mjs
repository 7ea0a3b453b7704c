// node tokenizer_oracle.mjs MODULES gpt-tokenizer|tiktoken TEXTS IDS: the ids of other encoders, in the form of
// tokenizer_ids.cpp. The mark of the end of text is ordinary text.
// node tokenizer_oracle.mjs MODULES tokenizers|transformers.js TEXTS IDS TOKENIZER as_text|special: those of a
// tokenizer.json, by Hugging Face's own implementations in Rust and JavaScript; `decode` takes ids and gives texts.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [modules, oracle, texts, ids, path, mode] = process.argv.slice(2);
const require = createRequire(resolve(modules, "..", "here.cjs"));

// That special tokens are text is an option of Python's transformers alone. Here they get other spellings, at the same
// ids; those that are in the model keep their ids without being found.
function withoutSpecial(json) {
  const kept = [];
  for (const token of json.added_tokens) {
    if (!token.special) kept.push(token);
    else if (!(token.content in json.model.vocab)) kept.push({ ...token, content: `\u{f0000}${token.id}\u{f0001}` });
  }
  return { ...json, added_tokens: kept };
}

let encode, decode;
if (oracle === "tiktoken") {
  const encoding = require("tiktoken").get_encoding("gpt2");
  encode = (text) => encoding.encode_ordinary(text);
} else if (oracle === "gpt-tokenizer") {
  const encoding = require("gpt-tokenizer/encoding/r50k_base");
  encode = (text) => encoding.encode(text, { allowedSpecial: new Set(), disallowedSpecial: new Set() });
} else {
  const whole = JSON.parse(readFileSync(path, "utf8"));
  const json = mode === "as_text" ? withoutSpecial(whole) : whole;
  if (oracle === "tokenizers") {
    const tokenizer = require("tokenizers").Tokenizer.fromString(JSON.stringify(json));
    encode = async (text) => (await tokenizer.encode(text, null, { addSpecialTokens: false })).getIds();
    decode = (list) => tokenizer.decode(list, false);
  } else {
    const tokenizer = new (require("@huggingface/tokenizers").Tokenizer)(json, {});
    encode = (text) => tokenizer.encode(text, { add_special_tokens: false }).ids;
    decode = (list) => tokenizer.decode(list, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  }
}
const bytes = readFileSync(texts);
const out = [];
for (let at = 0; at < bytes.length; ) {
  const size = bytes.readUInt32LE(at);
  if (mode === "decode") {
    const list = Array.from({ length: size }, (_, i) => bytes.readUInt32LE(at + 4 + 4 * i));
    const text = Buffer.from(await decode(list), "utf8");
    out.push(Buffer.from(Uint32Array.of(text.length).buffer), text);
    at += 4 + 4 * size;
    continue;
  }
  const found = await encode(bytes.toString("utf8", at + 4, at + 4 + size));
  out.push(Buffer.from(Uint32Array.of(found.length).buffer));
  out.push(Buffer.from(Uint32Array.from(found).buffer));
  at += 4 + size;
}
writeFileSync(ids, Buffer.concat(out));

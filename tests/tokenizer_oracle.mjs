// node tokenizer_oracle.mjs MODULES gpt-tokenizer|tiktoken TEXTS IDS: the ids of other encoders, in the form of
// tokenizer_ids.cpp. The mark of the end of text is ordinary text.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [modules, oracle, texts, ids] = process.argv.slice(2);
const require = createRequire(resolve(modules, "..", "here.cjs"));
let encode;
if (oracle === "tiktoken") {
  const encoding = require("tiktoken").get_encoding("gpt2");
  encode = (text) => encoding.encode_ordinary(text);
} else {
  const encoding = require("gpt-tokenizer/encoding/r50k_base");
  encode = (text) => encoding.encode(text, { allowedSpecial: new Set(), disallowedSpecial: new Set() });
}
const bytes = readFileSync(texts);
const out = [];
for (let at = 0; at < bytes.length; ) {
  const size = bytes.readUInt32LE(at);
  const found = encode(bytes.toString("utf8", at + 4, at + 4 + size));
  out.push(Buffer.from(Uint32Array.of(found.length).buffer));
  out.push(Buffer.from(Uint32Array.from(found).buffer));
  at += 4 + size;
}
writeFileSync(ids, Buffer.concat(out));

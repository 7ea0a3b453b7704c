#!/usr/bin/env bash
# Builds the documentation as a site of plain HTML: README, docs/*.md and a page for each public name, with a search.
#   scripts/docs.sh [FOLDER]   writes the site into FOLDER (default build/docs). Open its index.html; it needs no server
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1-} in
  -*) misuse "unknown option '$1'; scripts/docs.sh [FOLDER]" ;;
esac
if [ $# -gt 1 ]; then misuse "give one folder at most"; fi
folder=build/docs
if [ $# = 1 ]; then folder=$(cd "$from" && realpath -m -- "$1"); fi
exec python3 scripts/docs.py --site "$folder"
